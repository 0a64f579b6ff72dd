"""Administration of a store without loading a model: list, select, delete and archive entries.

It opens the tiers and catalog that the settings describe. The output for people is in the command
line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragfuse.admin.quotas import TenantUse
from ragfuse.errors import InputError, SettingsError, StoreError
from ragfuse.plan.evict import lru
from ragfuse.schemas.registry import SchemaRegistry
from ragfuse.sessions.session_store import SessionStore
from ragfuse.settings import Settings
from ragfuse.store import KVStore, archive, deletion, open_catalog, open_store
from ragfuse.store.archive import Outcome, Progress
from ragfuse.store.catalog import KnownText
from ragfuse.store.deletion import (
    Chunk,
    chunk_named,
    chunk_of,
    forget_texts,
    sources_in_order,
)
from ragfuse.store.factory import free_name, kept_places, open_tier
from ragfuse.store.tenants import Tenant, tenants_in
from ragfuse.store.urls import shown
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

_SHOWN_CHARS = 200
"""Characters of a chunk's text that an `EntryRow` shows."""
_N_READ = 4
"""Entries of a tier that `tier_statuses` reads as a test, those used last."""


@dataclass(frozen=True)
class EntryRow:
    """One entry with its tenant, its sources, and the beginning of the chunk's text.

    Args:
        entry: The entry.
        tenant: Its tenant.
        text: The beginning of the chunk's text.
        sources: The sources of the chunk; the one that brought it first is the first.
    """

    entry: Entry
    tenant: Tenant
    text: str = ""
    sources: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The source that brought the chunk first; "" for none."""
        return next(iter(self.sources), "")

    @property
    def short(self) -> str:
        """The first 12 characters of the chunk's key; all entries of a chunk share them."""
        return self.entry.key.tokens[:12]

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain JSON types."""
        entry, tenant = self.entry, self.tenant
        return {
            "key": str(entry.key),
            "model": tenant.model,
            "digest": tenant.digest,
            "tenant": tenant.tenant,
            "tier": entry.tier,
            "encoded": entry.key.encoded,
            "source": self.source,
            "sources": list(self.sources),
            "text": self.text,
            "n_tokens": entry.n_tokens,
            "n_layers": entry.n_layers,
            "nbytes": entry.nbytes,
            "levels": dict(entry.sizes),
            "hits": entry.hits,
            "last_used": entry.last_used,
            "pinned": entry.pinned,
        }


@dataclass(frozen=True)
class EntryFilter:
    """Selects the entries that match all given conditions.

    Args:
        keys: Beginnings of chunk keys; an entry matches if its key begins with any of them.
        tier: Name of a tier.
        model: A model's name, or the beginning of a tenant's digest (at least 4 characters).
        tenant: A tenant's salt, or its name (`store.tenants.tenant_name`).
        source: Part of the source of the text, in any case.
    """

    keys: Sequence[str] = ()
    tier: str | None = None
    model: str | None = None
    tenant: str | None = None
    source: str | None = None

    @property
    def selects_all(self) -> bool:
        """Whether no condition is given, so that it selects all entries."""
        return self == EntryFilter()

    @property
    def selects_tenants(self) -> bool:
        """Whether it selects whole tenants: all entries of some tenants, or of all."""
        return not self.keys and self.tier is None and self.source is None


@dataclass(frozen=True)
class Cleared:
    """The result of `StoreAdmin.clear`.

    Args:
        dropped: Entries that were deleted.
        texts: Number of texts deleted from the catalog; none while any tier does not answer, as it
            may hold entries.
        silent: Tiers that failed to delete or do not answer.
    """

    dropped: Sequence[EntryRow]
    texts: int
    silent: Sequence[str]


@dataclass(frozen=True)
class TierStatus:
    """The state of one tier.

    Args:
        name: Its name.
        where: Its folder or URL, without secrets.
        answers: Whether it answers.
        entries: Number of its entries.
        nbytes: Bytes of its entries.
        capacity: Bytes that it may hold.
        wrong: Why it cannot be used at all; "" where it can.
        read: Number of entries that were read as a test: a few of those used last.
        corrupt: How many of these could not be read, and were deleted.
    """

    name: str
    where: str
    answers: bool = True
    entries: int = 0
    nbytes: int = 0
    capacity: int = 0
    wrong: str = ""
    read: int = 0
    corrupt: int = 0


def tier_statuses(settings: Settings) -> Iterator[TierStatus]:
    """Yield the state of each tier in the settings that outlives a process. No folder is
    created.
    """
    settings = settings.placed()
    names: list[str] = []
    for url, own in kept_places(settings):
        where = shown(url)
        path = url.removeprefix("file://")
        if "://" not in path and not Path(path).exists():
            status = TierStatus(
                free_name("disk" if path == url else "objects", names),
                where,
                capacity=own.tier_bytes,
            )
        else:
            status = _tier_status(url, where, own, names)
        names.append(status.name)
        yield status


def _tier_status(url: str, where: str, settings: Settings, names: list[str]) -> TierStatus:
    try:
        tier = open_tier(url, settings, lru, names)
    except StoreError as error:
        return TierStatus(where, where, answers=False, wrong=str(error))
    with KVStore([tier]) as store:
        entries = store.entries()
        nbytes = sum(entry.nbytes for entry in entries)
        sample = sorted(entries, key=lambda entry: entry.last_used)[-_N_READ:]
        for entry in sample:
            store.read_layers(entry.key, 0, entry.n_layers, tier.name)
        corrupt, answers = tier.counts["corrupt"], not store.silent()
        return TierStatus(
            tier.name,
            where,
            answers,
            len(entries),
            nbytes,
            tier.capacity,
            read=len(sample),
            corrupt=corrupt,
        )


class StoreAdmin:
    """The store and the catalog that the settings describe.

    It has no memory tiers: these belong to the process that fills them.

    Raises:
        SettingsError: The settings describe no tier that outlives a process.
    """

    def __init__(self, settings: Settings) -> None:
        if not settings.disk_bytes and not settings.tiers:
            raise SettingsError(
                "With these settings KV is stored in memory only (disk_bytes is 0, tiers is empty)"
                " and lost when the process ends, so there is nothing to manage. Set disk_bytes or"
                " tiers."
            )
        settings = settings.placed()
        self.path, self._salt = settings.store_path, settings.salt
        self.catalog = open_catalog(settings)
        self.store = open_store(settings.model_copy(update={"gpu_bytes": 0, "memory_bytes": 0}))

    def within_tenant(self, entry_filter: EntryFilter) -> EntryFilter:
        """Restrict a filter to the tenant of the settings' salt, if a salt is set and the filter
        names no tenant.
        """
        return (
            replace(entry_filter, tenant=self._salt)
            if self._salt and entry_filter.tenant is None
            else entry_filter
        )

    def list_entries(self, entry_filter: EntryFilter = EntryFilter()) -> list[EntryRow]:
        """Return the selected entries, most recently used first.

        Raises:
            InputError: The beginning of a key matches no chunk or several.
            StoreError: There is no such tier.
        """
        if entry_filter.tier is not None:
            self.store.tier(entry_filter.tier)
        found = [entry for entry in self.store.entries() if entry_filter.tier in (None, entry.tier)]
        rows = [row for row in self._rows_of(found) if _matches(row, entry_filter)]
        if entry_filter.keys:
            chunks = {_chunk_of_key(rows, beginning) for beginning in entry_filter.keys}
            rows = [row for row in rows if chunk_of(row.entry.key) in chunks]
        return sorted(rows, key=lambda row: -row.entry.last_used)

    def uses(
        self, rows: Sequence[EntryRow], entry_filter: EntryFilter
    ) -> list[tuple[Tenant, TenantUse]]:
        """Return what each tenant with selected entries keeps in all, largest first: bytes by tier,
        texts and sessions.

        Args:
            rows: The selected entries.
            entry_filter: The filter that selected them; one that selects tenants as a whole has
                those without entries, too.
        """
        tenants, nbytes = tenants_in(self.catalog.strict), dict[str, Counter[str]]()
        named = {row.entry.key.model for row in rows}.union(self.text_models(entry_filter))
        entries = (
            [row.entry for row in rows] if entry_filter.selects_tenants else self.store.entries()
        )
        for entry in entries:
            nbytes.setdefault(entry.key.model, Counter())[entry.tier] += entry.nbytes
        catalog = self.catalog.strict
        found = [
            (
                tenants[digest],
                TenantUse(
                    nbytes.get(digest, {}),
                    catalog.count_texts(digest),
                    catalog.count_sessions(digest),
                ),
            )
            for digest in named
        ]
        return sorted(found, key=lambda pair: (-sum(pair[1].nbytes.values()), pair[0].digest))

    def silent(self, entry_filter: EntryFilter = EntryFilter()) -> list[str]:
        """Return the selected tiers that do not answer; an earlier listing lacks their entries."""
        return [name for name in self.store.silent() if entry_filter.tier in (None, name)]

    def clear(self, rows: Sequence[EntryRow], entry_filter: EntryFilter) -> Cleared:
        """Delete `rows`, which the filter selected, and the texts of chunks that have no entry
        left.
        """
        done = self.store.forget({row.entry.key for row in rows}, entry_filter.tier)
        silent = list(dict.fromkeys((*done.silent, *self.store.silent())))
        removed = {(entry.key, entry.tier) for entry in done.entries}
        gone = [row for row in rows if (row.entry.key, row.entry.tier) in removed]
        chunks = {chunk_of(row.entry.key) for row in gone} - {
            chunk_of(entry.key) for entry in self.store.entries()
        }
        if silent:
            return Cleared(gone, 0, silent)
        catalog = self.catalog.strict
        texts = sum(catalog.delete_texts(model) for model in self.text_models(entry_filter))
        return Cleared(gone, texts + forget_texts(catalog, chunks), silent)

    def text_models(self, entry_filter: EntryFilter) -> list[str]:
        """Return the digests of the tenants that a filter selects as a whole, with all
        their texts.
        """
        tenants = tenants_in(self.catalog.strict)
        known = self.catalog.strict.tenants() if entry_filter.selects_tenants else []
        return [digest for digest in known if _matches_tenant(tenants[digest], entry_filter)]

    def export(
        self, rows: Sequence[EntryRow], path: Path, texts: bool, progress: Progress | None = None
    ) -> Outcome:
        """Write entries, and their texts if wanted, to an archive; an incomplete archive replaces
        no existing file.
        """
        entries = [row.entry for row in rows]
        known = self._texts(entries) if texts else ()
        tables = self.store.tables.entries()  # without which some could not be decoded elsewhere
        return archive.export(self.store, path, [*entries, *tables], known, progress)

    def import_(self, path: Path, tier: str | None, progress: Progress | None = None) -> Outcome:
        """Import the entries and texts of an archive."""
        take_texts = self._add_texts if self.catalog.file is not None else None
        return archive.import_(self.store, path, tier, take_texts, progress)

    def gc(self) -> dict[str, deletion.Freed]:
        """Delete expired entries and files that no entry needs; return what was freed, by tier."""
        return deletion.gc(self.store)

    @property
    def schemas(self) -> SchemaRegistry:
        """The stored schemas of the tenant whose salt is set."""
        return SchemaRegistry(self.store, self.catalog, self._salt)

    @property
    def sessions(self) -> SessionStore:
        """The sessions in the catalog: one tenant's if a salt is set, else those of all tenants."""
        return SessionStore(self.store, self.catalog, self._tenant_digests)

    def _tenant_digests(self) -> list[str] | None:
        if not self._salt:
            return None
        return [
            digest
            for digest, tenant in tenants_in(self.catalog.strict).items()
            if tenant.is_of(self._salt)
        ]

    def close(self) -> None:
        """Close all files."""
        self.store.close()
        self.catalog.close()

    def __enter__(self) -> StoreAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # inside

    def _rows_of(self, found: Sequence[Entry]) -> Iterator[EntryRow]:
        tenants, texts, sources = (
            tenants_in(self.catalog.strict),
            dict[Chunk, str](),
            dict[Chunk, list[str]](),
        )
        for model in {entry.key.model for entry in found}:
            for known in self.catalog.strict.texts(model):
                chunk = chunk_named(known.key)
                texts.setdefault(chunk, known.text[:_SHOWN_CHARS])
                sources.setdefault(chunk, []).append(known.source)
        for entry in found:
            chunk = chunk_of(entry.key)
            names = sources_in_order(filter(None, sources.get(chunk, ())))
            yield EntryRow(entry, tenants[entry.key.model], texts.get(chunk, ""), names)

    def _texts(self, entries: Iterable[Entry]) -> list[KnownText]:
        wanted = {chunk_of(entry.key) for entry in entries}
        models = sorted({model for model, _ in wanted})
        known = (text for model in models for text in self.catalog.strict.texts(model))
        return [text for text in known if chunk_named(text.key) in wanted]

    def _add_texts(self, texts: Sequence[KnownText]) -> None:
        by_model: dict[str, list[KnownText]] = {}
        for text in texts:
            by_model.setdefault(ChunkKey.parse(text.key).model, []).append(text)
        for model, known in by_model.items():
            self.catalog.strict.add_texts(model, known)


def _matches(row: EntryRow, entry_filter: EntryFilter) -> bool:
    part = (entry_filter.source or "").casefold()
    return _matches_tenant(row.tenant, entry_filter) and (
        not part or any(part in source.casefold() for source in row.sources)
    )


def _matches_tenant(tenant: Tenant, entry_filter: EntryFilter) -> bool:
    model, salt = entry_filter.model, entry_filter.tenant
    is_model = model in (None, tenant.model) or (
        len(model or "") >= 4 and tenant.digest.startswith(model or "")
    )
    return is_model and (salt is None or tenant.is_of(salt) or tenant.is_named(salt))


def _chunk_of_key(rows: Sequence[EntryRow], beginning: str) -> Chunk:
    """Return the one chunk whose key begins with `beginning`; InputError for none or several."""
    found = {
        chunk_of(row.entry.key): row.tenant.name
        for row in rows
        if beginning
        and (row.entry.key.tokens.startswith(beginning) or str(row.entry.key).startswith(beginning))
    }
    if len(found) != 1:
        names = "".join(
            f", {tokens[:16]} of {name}" for (_, tokens), name in list(found.items())[:4]
        )
        raise InputError(
            f"Wanted the beginning of one chunk's key, found that '{beginning}' begins"
            f" {len(found)}{names}. `ragfuse store ls` lists all keys; --model and --tenant tell"
            " tenants apart."
        )
    return next(iter(found))
