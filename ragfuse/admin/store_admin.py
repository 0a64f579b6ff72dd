"""A store looked after without its model: whose entries are in it, from which text, and which of them are meant.

Opens what the settings describe, with the policies that keep it. Nothing here imports a model; what is done with
many chunks is `store/bulk.py`'s business, and how it is shown the command line's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragfuse.admin.quotas import TenantUse, written_use
from ragfuse.engine.store_opener import open_kept
from ragfuse.errors import InputError, SettingsError, StoreError
from ragfuse.plan.evict import lru
from ragfuse.schemas.registry import SchemaRegistry
from ragfuse.sessions.session_store import Deleted, SessionInfo, SessionStore
from ragfuse.settings import Settings
from ragfuse.store import CatalogFile, KVStore, bulk
from ragfuse.store.archive import ArchivedText
from ragfuse.store.bulk import Outcome, Progress, unanswered
from ragfuse.store.catalog import Catalog
from ragfuse.store.codec_registry import CodecRegistry
from ragfuse.store.deletion import Chunk, chunk_named, chunk_of, dropped, forget_texts
from ragfuse.store.factory import free_name, open_tier
from ragfuse.store.recode import recode
from ragfuse.store.tenants import Tenant, hidden
from ragfuse.store.tier import Freed
from ragfuse.store.urls import shown
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

__all__ = [
    "CatalogFile",
    "Cleared",
    "Deleted",
    "EntryFilter",
    "EntryRow",
    "Freed",
    "Outcome",
    "Progress",
    "SessionInfo",
    "StoreAdmin",
    "Tenant",
    "TierStatus",
    "look",
    "open_kept",
    "unanswered",
]

_SHOWN = 200
_READ = 4


@dataclass(frozen=True)
class EntryRow:
    """One entry, and what is known of it. `text` is the beginning of the chunk's own text."""

    entry: Entry
    tenant: Tenant
    source: str = ""
    text: str = ""

    @property
    def short(self) -> str:
        """Enough of the key to name the chunk by; its entries in other company and other tiers share it."""
        return self.entry.key.tokens[:12]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        entry, who = (
            self.entry,
            {"model": self.tenant.model, "digest": self.tenant.digest, "tenant": self.tenant.tenant},
        )
        return {
            **{"key": str(entry.key), **who, "tier": entry.tier, "encoded": entry.key.encoded, "source": self.source},
            **{"text": self.text, "n_tokens": entry.n_tokens, "n_layers": entry.n_layers, "nbytes": entry.nbytes},
            **{"levels": dict(entry.sizes)},
            **{"hits": entry.hits, "last_used": entry.last_used, "pinned": entry.pinned},
        }


@dataclass(frozen=True)
class EntryFilter:
    """Which entries are meant: those that match all that is given.

    keys: beginnings of chunks' keys, any of them. model: a model's name, or the beginning of a digest. tenant: a salt.
    source: a part of where the text came from, in any case.
    """

    keys: Sequence[str] = ()
    tier: str | None = None
    model: str | None = None
    tenant: str | None = None
    source: str | None = None

    @property
    def is_anything(self) -> bool:
        """Whether nothing is given."""
        return self == EntryFilter()

    @property
    def is_of_tenants(self) -> bool:
        """Whether it means all that some tenants have, or all tenants."""
        return not self.keys and self.tier is None and self.source is None


@dataclass(frozen=True)
class Cleared:
    """What clearing came to: entries that are gone, those that stayed, how many texts are gone.

    silent: tiers that were meant and could not be cleared, or do not answer; unknown: others that do not answer. What
    else either hold is not known, so all texts stay.
    """

    dropped: Sequence[EntryRow]
    stayed: Sequence[EntryRow]
    texts: int
    silent: Sequence[str]
    unknown: Sequence[str] = ()


@dataclass(frozen=True)
class TierStatus:
    """A tier as it is found: what it is called, where it is, whether it answers, and what it holds then.

    wrong: why it cannot be used at all, "" where it can. corrupt: how many of the `read` entries, a few that were used
    last, could not be read and are gone.
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


def look(settings: Settings) -> Iterator[TierStatus]:
    """Each tier of the settings that outlives a process, looked at by itself; no folder is made."""
    settings = settings.placed()
    places = [(str(settings.store_path), settings.disk_bytes)] if settings.disk_bytes else []
    places += [(url, settings.tier_bytes) for url in settings.tiers]
    taken: list[str] = []
    for url, capacity in places:
        where = shown(url)
        here = url.removeprefix("file://")
        if "://" not in here and not Path(here).exists():
            place = TierStatus(free_name("disk" if here == url else "objects", taken), where, capacity=capacity)
        else:
            place = _looked(url, where, settings.model_copy(update={"tier_bytes": capacity}), taken)
        taken.append(place.name)
        yield place


def _looked(url: str, where: str, settings: Settings, taken: list[str]) -> TierStatus:
    try:
        tier = open_tier(url, settings, lru, taken)
    except StoreError as error:
        return TierStatus(where, where, answers=False, wrong=str(error))
    with KVStore([tier]) as store:
        entries = store.entries()
        nbytes = sum(entry.nbytes for entry in entries)
        some = sorted(entries, key=lambda entry: entry.last_used)[-_READ:]
        for entry in some:
            store.read_layers(entry.key, 0, entry.n_layers, tier.name)
        corrupt, answers = tier.counts["corrupt"], not store.silent()
        return TierStatus(
            tier.name, where, answers, len(entries), nbytes, tier.capacity, read=len(some), corrupt=corrupt
        )


class StoreAdmin:
    """The store and the catalog of some settings, without memory: what lies there belongs to the process that fills
    it."""

    def __init__(self, settings: Settings) -> None:
        if not settings.disk_bytes and not settings.tiers:
            raise SettingsError(
                "The settings leave a store no place but memory (disk_bytes is 0, tiers is empty), which ends with its "
                "process. Give disk_bytes or tiers to have something to look after."
            )
        settings = settings.placed()
        self.path, self._salt = settings.store_path, settings.salt
        file = CatalogFile(settings.store_path, settings.shared_with) if settings.disk_bytes else None
        self.catalog = Catalog(file)
        coding = CodecRegistry(self.catalog)
        self.store = open_kept(settings.model_copy(update={"gpu_bytes": 0, "memory_bytes": 0}), codecs=coding)
        coding.tiers = self.store.tiers

    def mine(self, wish: EntryFilter) -> EntryFilter:
        """The same of the tenant alone whose salt is set, unless a tenant is named; without a salt, of all."""
        return replace(wish, tenant=self._salt) if self._salt and wish.tenant is None else wish

    def lines(self, wish: EntryFilter = EntryFilter()) -> list[EntryRow]:
        """Entries that are meant, used last first. InputError for a key that means none, or several chunks."""
        if wish.tier is not None:
            self._check_tier(wish.tier)
        tenants = self._tenants()
        found = [entry for entry in self.store.entries() if wish.tier in (None, entry.tier)]
        lines = list(self._known([(entry, tenants.get(entry.key.model, Tenant(entry.key.model))) for entry in found]))
        lines = [line for line in lines if _matches(line, wish)]
        if wish.keys:
            meant = {chunk for beginning in wish.keys for chunk in _chunk_of(lines, beginning)}
            lines = [line for line in lines if chunk_of(line.entry.key) in meant]
        return sorted(lines, key=lambda line: -line.entry.last_used)

    def uses(self, lines: Sequence[EntryRow], wish: EntryFilter) -> list[tuple[Tenant, TenantUse]]:
        """What each tenant that is meant keeps in all: bytes of these entries by tier, and all its texts and sessions;
        the largest first."""
        tenants, nbytes = self._tenants(), dict[str, Counter[str]]()
        for line in lines:
            nbytes.setdefault(line.entry.key.model, Counter())[line.entry.tier] += line.entry.nbytes
        named = {line.entry.key.model for line in lines} | {
            digest
            for digest in self.catalog.strict.tenants()
            if not (wish.keys or wish.tier or wish.source) and _is_of(tenants.get(digest, Tenant(digest)), wish)
        }
        found = [
            (
                tenants.get(digest, Tenant(digest)),
                TenantUse(dict(nbytes.get(digest, {})), *written_use(self.catalog.strict, digest)),
            )
            for digest in named
        ]
        return sorted(found, key=lambda pair: (-sum(pair[1].nbytes.values()), pair[0].digest))

    def silent(self, wish: EntryFilter = EntryFilter()) -> list[str]:
        """Tiers that are meant and do not answer now: a listing made before lacks what they hold."""
        return [name for name in self.store.silent() if wish.tier in (None, name)]

    def clear(self, lines: Sequence[EntryRow], wish: EntryFilter) -> Cleared:
        """Forget these entries, those that `wish` means, and the texts of chunks that are kept nowhere afterwards."""
        left = self.store.drop([line.entry.key for line in lines], wish.tier)
        kept = {chunk_of(entry.key) for entry in self.store.entries()}
        done = dropped(self.store, left, wish.tier)
        stayed = [line for line in lines if done.has_left(line.entry)]
        gone = [line for line in lines if not done.has_left(line.entry)]
        chunks = {chunk_of(line.entry.key) for line in gone} - kept
        texts = 0 if done.silent or done.unknown else self._forget_texts(chunks, wish)
        return Cleared(gone, stayed, texts, done.silent, done.unknown)

    def text_models(self, wish: EntryFilter) -> list[str]:
        """Digests of the tenants all of whose texts are meant."""
        tenants = self._tenants()
        known = self.catalog.strict.models() if wish.is_of_tenants else []
        return [digest for digest in known if _is_of(tenants.get(digest, Tenant(digest)), wish)]

    def _forget_texts(self, gone: set[Chunk], wish: EntryFilter) -> int:
        """Delete the texts of chunks that are gone, and all that the tenants have who are meant; how many."""
        return sum(self.catalog.strict.delete_texts(model) for model in self.text_models(wish)) + forget_texts(
            self.catalog.strict, gone
        )

    def move(self, lines: Sequence[EntryRow], tier: str, progress: Progress | None = None) -> Outcome:
        """Keep these in another tier and nowhere else. StoreError if that does not answer."""
        self._check_tier(tier)
        if tier in self.store.silent():
            raise StoreError(unanswered([tier], "nothing was moved"))
        return bulk.move(self.store, [line.entry.key for line in lines], tier, progress)

    def recode(self, lines: Sequence[EntryRow], levels: Sequence[str], progress: Progress | None = None) -> Outcome:
        """Keep these at other codec levels, each in its tier."""
        return recode(self.store, [(line.entry.tier, line.entry.key) for line in lines], levels, progress)

    def export(self, lines: Sequence[EntryRow], path: Path, texts: bool, progress: Progress | None = None) -> Outcome:
        """Write these, with their texts if wanted, into one file; it replaces none if it would lack one of them."""
        keys = list(dict.fromkeys(line.entry.key for line in lines))
        return bulk.export(self.store, path, keys, self._texts(keys) if texts else (), progress)

    def import_(self, path: Path, tier: str | None, progress: Progress | None = None) -> Outcome:
        """Keep what an archive holds, its texts too."""
        if tier is not None:
            self._check_tier(tier)
        return bulk.import_(
            self.store, path, tier, self._take_texts if self.catalog.file is not None else None, progress
        )

    def gc(self) -> dict[str, Freed]:
        """Free what is too old and what no entry needs; what was given back, by tier."""
        return bulk.gc(self.store)

    @property
    def schemas(self) -> SchemaRegistry:
        """Schemas of the salt's tenant, as they are written down."""
        return SchemaRegistry(self.store, self.catalog, self._salt)

    @property
    def sessions(self) -> SessionStore:
        """The sessions in the catalog: of the tenant whose salt is set, or, without a salt, of all."""
        return SessionStore(self.store, self.catalog, self._whose)

    def _whose(self) -> list[str] | None:
        mine = self.mine(EntryFilter())
        return [digest for digest, tenant in self._tenants().items() if _is_of(tenant, mine)] if self._salt else None

    def close(self) -> None:
        """Let go of all files."""
        self.store.close()
        self.catalog.close()

    def __enter__(self) -> StoreAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # inside

    def _check_tier(self, name: str) -> None:
        names = [tier.name for tier in self.store.tiers]
        if name in ("gpu", "memory") and name not in names:
            raise InputError(
                f"The tier '{name}' belongs to the process that fills it and ends with it; from here it cannot be "
                f"reached. Name one of: {', '.join(names)}."
            )
        self.store.tier(name)

    def _tenants(self) -> dict[str, Tenant]:
        names = [name for name in self.catalog.strict.names() if name.startswith("tenant-")]
        profiles = {name.removeprefix("tenant-"): self.catalog.strict.get(name) or {} for name in names}
        return {
            digest: Tenant(digest, str(found.get("model", "")), str(found.get("tenant", "")))
            for digest, found in profiles.items()
        }

    def _known(self, found: Sequence[tuple[Entry, Tenant]]) -> Iterator[EntryRow]:
        texts: dict[tuple[str, str], tuple[str, str]] = {}
        file = self.catalog.file
        for model in {entry.key.model for entry, _ in found}:
            for known in file.texts(model) if file is not None else ():
                texts.setdefault(chunk_named(known.key), (known.source, known.text[:_SHOWN]))
        for entry, tenant in found:
            yield EntryRow(entry, tenant, *texts.get(chunk_of(entry.key), ("", "")))

    def _texts(self, keys: Iterable[ChunkKey]) -> Iterator[ArchivedText]:
        wanted, file = {chunk_of(key) for key in keys}, self.catalog.file
        for model in sorted({model for model, _ in wanted}):
            for known in file.texts(model) if file is not None else ():
                if chunk_named(known.key) in wanted:
                    yield ArchivedText(model, *known)

    def _take_texts(self, texts: Sequence[ArchivedText]) -> None:
        by_model: dict[str, list[tuple[str, str, str]]] = {}
        for text in texts:
            by_model.setdefault(text.model, []).append((text.key, text.text, text.source))
        for model, known in by_model.items():
            self.catalog.strict.add_texts(model, known)


def _matches(line: EntryRow, wish: EntryFilter) -> bool:
    source = wish.source
    return _is_of(line.tenant, wish) and (source is None or source.casefold() in line.source.casefold())


def _is_of(tenant: Tenant, wish: EntryFilter) -> bool:
    named = wish.model is None or wish.model == tenant.model or _begins(tenant.digest, wish.model)
    return named and (wish.tenant is None or (hidden(wish.tenant) == tenant.tenant and bool(tenant.model)))


def _begins(digest: str, beginning: str) -> bool:
    return len(beginning) >= 4 and digest.startswith(beginning)


def _chunk_of(lines: Sequence[EntryRow], beginning: str) -> set[tuple[str, str]]:
    """The one chunk whose key begins so."""
    found = {
        chunk_of(line.entry.key): line
        for line in lines
        if beginning and (line.entry.key.tokens.startswith(beginning) or str(line.entry.key).startswith(beginning))
    }
    if not found:
        raise InputError(
            f"Wanted the beginning of a chunk's key, found none that begins with '{beginning}'. "
            "`ragfuse store ls` lists them."
        )
    if len(found) > 1:
        named = ", ".join(f"{line.entry.key.tokens[:16]} of {line.tenant.name}" for line in list(found.values())[:4])
        raise InputError(
            f"'{beginning}' is the beginning of {len(found)} chunks' keys: {named}{', ...' if len(found) > 4 else ''}. "
            "Give more of it, or --model or --tenant."
        )
    return set(found)
