"""List, filter and delete the store's entries with their tenants and texts, without a model."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ragfuse.errors import InputError, SettingsError, StoreError
from ragfuse.schemas.registry import SchemaRegistry
from ragfuse.sessions.session_store import SessionStore
from ragfuse.settings import Settings
from ragfuse.store import open_catalog, open_store
from ragfuse.store.catalog import KnownText, Tenant, tenants_in
from ragfuse.store.deletion import (
    Chunk,
    chunk_named,
    chunk_of,
    forget_texts,
    sources_in_order,
    texts_by_chunk,
    unanswered,
)
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

SHOWN_CHARS = 200
"""Number of characters of a chunk's text that are shown."""


@dataclass(frozen=True)
class EntryRow:
    """A stored entry, with its tenant and the known texts of its chunk (one text per source)."""

    entry: Entry
    tenant: Tenant
    known: Sequence[KnownText] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the chunk, in the order of `sources_in_order`."""
        return sources_in_order(known.source for known in self.known if known.source)

    def as_dict(self) -> dict[str, Any]:
        """Return the row in plain JSON types."""
        entry, names = self.entry, ("tier", "n_tokens", "n_layers", "nbytes", "hits", "last_used")
        return {
            "key": str(entry.key),
            **vars(self.tenant),
            **{name: getattr(entry, name) for name in (*names, "pinned")},
            "encoded": entry.key.encoded,
            "levels": dict(entry.sizes),
            "source": next(iter(self.sources), ""),
            "sources": list(self.sources),
            "text": self.known[0].text[:SHOWN_CHARS] if self.known else "",
        }


@dataclass(frozen=True)
class EntryFilter:
    """Selects the entries that match all given conditions. A condition of None matches any entry.

    Args:
        keys: Prefixes of chunk keys. Each prefix selects the entries of exactly one chunk.
        tier: Name of a tier.
        model: A model's name, or a prefix of a model digest (at least 4 characters).
        tenant: The salt or the name (`store.catalog.tenant_name`) of a tenant.
        source: Text that a source of the chunk contains, ignoring case.
    """

    keys: Sequence[str] = ()
    tier: str | None = None
    model: str | None = None
    tenant: str | None = None
    source: str | None = None

    def has(self, row: EntryRow) -> bool:
        """Return True if a row matches all conditions except `keys`."""
        return (
            self.tier in (None, row.entry.tier)
            and self.has_tenant(row.tenant)
            and (not self.source or any(map(self.has_source, row.sources)))
        )

    def has_source(self, source: str) -> bool:
        """Return True if a source matches the condition `source`."""
        return (self.source or "").casefold() in source.casefold()

    def has_tenant(self, tenant: Tenant) -> bool:
        """Return True if a tenant matches the conditions `model` and `tenant`."""
        model, salt = self.model, self.tenant
        is_model = model in (None, tenant.model) or (
            len(model or "") >= 4 and tenant.digest.startswith(model or "")
        )
        return is_model and (salt is None or tenant.is_of(salt) or tenant.is_named(salt))


class OpenStore(ExitStack):
    """The store and the catalog, opened without a model and closed together.

    Memory tiers are left out, because a memory tier belongs to the process that fills the tier.

    Raises:
        SettingsError: The settings have no persistent tier.
    """

    def __init__(self, settings: Settings) -> None:
        if not settings.disk_bytes and not settings.tiers:
            raise SettingsError(
                "With these settings KV is stored in memory only (disk_bytes is 0, tiers is"
                " empty), so there are no entries to manage. Set disk_bytes or tiers."
            )
        super().__init__()
        settings = settings.placed()
        self._salt = settings.salt
        self.catalog = self.enter_context(open_catalog(settings))
        self.store = self.enter_context(
            open_store(settings.model_copy(update={"gpu_bytes": 0, "memory_bytes": 0}))
        )
        self.schemas = SchemaRegistry(self.store, self.catalog, self._salt)
        """The schemas of the tenant with the salt in the settings."""
        self.sessions = SessionStore(self.store, self.catalog, self._tenants)
        """The sessions of the salt's tenant, or all sessions if the settings have no salt."""

    def selected(self, entry_filter: EntryFilter) -> list[EntryRow]:
        """Return the selected entries, most recently used first.

        Raises:
            InputError: A key prefix matches no chunk, or several chunks.
            StoreError: The filter names an unknown tier.
        """
        if entry_filter.tier is not None:
            self.store.tier(entry_filter.tier)
        found = [row for row in self._rows() if entry_filter.has(row)]
        chunks = {_chunk_of_key(found, beginning) for beginning in entry_filter.keys}
        return [row for row in found if not chunks or chunk_of(row.entry.key) in chunks]

    def tenants(self, entry_filter: EntryFilter) -> list[Tenant]:
        """Return the matching tenants that have entries, texts or sessions."""
        catalog = self.catalog.strict
        known, models = tenants_in(catalog), {entry.key.model for entry in self.store.entries()}
        found = [known[digest] for digest in sorted(models.union(catalog.tenants()))]
        return [tenant for tenant in found if entry_filter.has_tenant(tenant)]

    def chunks(self, rows: Sequence[EntryRow], entry_filter: EntryFilter) -> set[Chunk]:
        """Return the chunks of `rows`. If keys and tier are unset, add chunks of matching texts."""
        found = {chunk_of(row.entry.key) for row in rows}
        if not entry_filter.keys and entry_filter.tier is None:
            for tenant in self.tenants(entry_filter):
                texts = self.catalog.strict.texts(tenant.digest)
                found |= {chunk_named(t.key) for t in texts if entry_filter.has_source(t.source)}
        return found

    def clear(
        self, rows: Sequence[EntryRow], chunks: Set[Chunk], tier: str | None
    ) -> tuple[Sequence[Entry], int]:
        """Delete the entries of `rows` from `tier` (None: all tiers), then delete unused texts.

        Returns:
            The deleted entries, and the number of deleted texts. A text is deleted if its chunk is
            in `chunks` and no tier has an entry of the chunk. If any tier is unresponsive, no text
            is deleted, because that tier may still store entries.

        Raises:
            StoreError: A tier could not delete its entries.
        """
        done = self.store.forget({row.entry.key for row in rows}, tier)
        if done.silent:
            raise StoreError(unanswered(done.silent, "the entries there and all texts were kept"))
        if self.store.silent():
            return done.entries, 0
        left = {chunk_of(entry.key) for entry in self.store.entries()}
        return done.entries, forget_texts(self.catalog.strict, chunks - left)

    def add_texts(self, texts: Sequence[KnownText]) -> None:
        """Add known texts to the catalog. The texts may belong to different models."""

        def model_of(text: KnownText) -> str:
            return ChunkKey.parse(text.key).model

        for model, mine in groupby(sorted(texts, key=model_of), model_of):
            self.catalog.strict.add_texts(model, mine)

    def _rows(self) -> list[EntryRow]:
        entries = self.store.entries()
        tenants = tenants_in(self.catalog.strict)
        known = texts_by_chunk(self.catalog.strict, {entry.key.model for entry in entries})
        rows = [
            EntryRow(entry, tenants[entry.key.model], known[chunk_of(entry.key)])
            for entry in entries
        ]
        return sorted(rows, key=lambda row: -row.entry.last_used)

    def _tenants(self) -> list[str] | None:
        if not self._salt:
            return None
        tenants = tenants_in(self.catalog.strict)
        return [digest for digest, tenant in tenants.items() if tenant.is_of(self._salt)]


def _chunk_of_key(rows: Sequence[EntryRow], beginning: str) -> Chunk:
    """Return the chunk whose key begins with `beginning`. Raise InputError for none or several."""
    found = {
        chunk_of(row.entry.key): row.tenant.name
        for row in rows
        if row.entry.key.tokens.startswith(beginning) or str(row.entry.key).startswith(beginning)
    }
    if len(found) != 1:
        some = list(found.items())[:3]
        names = "".join(f", {tokens[:16]} of {name}" for (_, tokens), name in some)
        raise InputError(
            f"A key must match one chunk, but '{beginning}' matches {len(found)} chunks{names}."
            " Copy more characters from `ragfuse store ls`, or use --model or --tenant."
        )
    return next(iter(found))
