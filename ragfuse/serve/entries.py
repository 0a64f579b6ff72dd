"""A tenant's stored chunks as a client sees them: rows by chunk, bytes by source, pins, deletion.

Only entries of the tenant's own digest are ever listed, pinned or deleted: another tenant's key selects nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ragfuse.admin.quotas import QuotaKeeper
from ragfuse.engine.engine import Engine
from ragfuse.serve.admission import RETRY_S
from ragfuse.serve.refusals import APIError
from ragfuse.store.deletion import Chunk, chunk_named, chunk_of, forget_chunks, leave_source, sources_in_order
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

ENTRY_CHARS = 200
"""Characters of a chunk's text that a row shows."""


@dataclass(frozen=True)
class Selection:
    """The chunks that a request is about: by the beginnings of their keys, by source, or all of them.

    Args:
        keys: Beginnings of keys.
        source: Where chunks came from.
        all: Whether all chunks are meant.
    """

    keys: Sequence[str] = ()
    source: str | None = None
    all: bool = False

    def checked(self) -> Selection:
        """Return it; APIError (400) unless exactly one condition is given."""
        if (bool(self.keys) + (self.source is not None) + self.all) != 1:
            raise APIError(400, "Give one of keys, source and all; found none or several.", "unusable", "keys")
        return self


@dataclass(frozen=True)
class StoredChunks:
    """The entries of one tenant, by chunk, with the sources and texts that the catalog has for them."""

    entries: Mapping[Chunk, Sequence[Entry]]
    texts: Mapping[Chunk, Sequence[tuple[str, str]]]

    @classmethod
    def of(cls, engine: Engine) -> StoredChunks:
        """Return what a tenant's engine has in all tiers."""
        found = defaultdict[Chunk, list[Entry]](list)
        for entry in engine.store.entries():
            if entry.key.model == engine.digest:
                found[chunk_of(entry.key)].append(entry)
        texts = defaultdict[Chunk, list[tuple[str, str]]](list)
        for known in engine.catalog.texts(engine.digest):
            texts[chunk_named(known.key)].append((known.source, known.text))
        return cls(found, texts)

    def rows(self, source: str | None = None, is_exact: bool = False) -> list[dict[str, Any]]:
        """Return a row for each chunk, most recently used first.

        Args:
            source: Only chunks with a source that contains this, in any case; "": only those without a source.
            is_exact: Whether `source` is the whole name of it.
        """

        def is_wanted(found: str) -> bool:
            return found == source if is_exact or not source else source.casefold() in found.casefold()

        rows = [self._row(c) for c in self.entries if source is None or any(map(is_wanted, self._sources(c)))]
        return sorted(rows, key=lambda row: -row["last_used"])

    def sources(self) -> list[dict[str, Any]]:
        """Return bytes, chunks and hits of each source, largest first; "" is what has no known text.

        `nbytes` counts KV once, however many tiers have a copy of it; `tiers` has the bytes of the copies. A chunk of
        several sources counts in each.
        """
        nbytes, chunks, hits = Counter[str](), Counter[str](), Counter[str]()
        tiers = defaultdict[str, Counter[str]](Counter)
        for chunk, entries in self.entries.items():
            for source in self._sources(chunk):
                nbytes[source] += kv_nbytes(entries)
                for tier, n in _by_tier(entries).items():
                    tiers[source][tier] += n
                chunks[source] += 1
                hits[source] += sum(entry.hits for entry in entries)
        return [
            {
                "source": source,
                "nbytes": n,
                "tiers": dict(tiers[source]),
                "chunks": chunks[source],
                "hits": hits[source],
            }
            for source, n in nbytes.most_common()
        ]

    def selected(self, selection: Selection) -> set[Chunk]:
        """Return the selected chunks; APIError (404) for a key that selects none."""
        if selection.all:
            return set(self.entries)
        if selection.source is not None:
            return {chunk for chunk in self.entries if selection.source in self._sources(chunk)}
        found = set[Chunk]()
        for key in selection.keys:
            matches = {chunk for chunk in self.entries if chunk[1].startswith(key)}
            if not matches:
                text = f"There is no chunk '{key:.80}' here. List them at /v1/ragfuse/entries."
                raise APIError(404, text, "not_found", "keys")
            found |= matches
        return found

    def _row(self, chunk: Chunk) -> dict[str, Any]:
        entries = self.entries[chunk]
        known = self.texts.get(chunk, ())
        sources = self._sources(chunk)
        return {
            "object": "ragfuse.entry",
            "key": chunk[1],
            "source": sources[0],
            "sources": [source for source in sources if source],
            "text": known[0][1][:ENTRY_CHARS] if known else "",
            "n_tokens": entries[0].n_tokens,
            "nbytes": kv_nbytes(entries),
            "tiers": sorted({entry.tier for entry in entries}),
            "levels": sorted({level for entry in entries for level in entry.sizes}),
            "encoded": sorted({entry.key.encoded for entry in entries}),
            "hits": sum(entry.hits for entry in entries),
            "last_used": max(entry.last_used for entry in entries),
            "pinned": any(entry.pinned for entry in entries),
        }

    def _sources(self, chunk: Chunk) -> tuple[str, ...]:
        """Return the sources of a chunk, the one that brought it first before others; ("",) where none is known."""
        return sources_in_order(source for source, _ in self.texts.get(chunk, ())) or ("",)


def kv_nbytes(entries: Iterable[Entry]) -> int:
    """Return the bytes of KV in entries; of the copies of a key in several tiers, the largest counts."""
    largest = dict[ChunkKey, int]()
    for entry in entries:
        largest[entry.key] = max(entry.nbytes, largest.get(entry.key, 0))
    return sum(largest.values())


def stored_chunks(engine: Engine, chunks: Sequence[Chunk]) -> list[int | None]:
    """Return the bytes of KV that a tenant's store has of each chunk, in whatever context; None: it has none.

    What is being saved counts as stored, with 0 bytes.
    """
    wanted = set(chunks)
    found: dict[Chunk, list[Entry]] = {
        chunk: [] for key in engine.store.under_way() if (chunk := chunk_of(key)) in wanted
    }
    for entry in engine.store.entries():
        if (chunk := chunk_of(entry.key)) in wanted:
            found.setdefault(chunk, []).append(entry)
    return [kv_nbytes(found[chunk]) if chunk in found else None for chunk in chunks]


def pin(engine: Engine, selection: Selection, pinned: bool) -> int:
    """Pin or unpin the selected chunks, and return how many they are; APIError (503) where a tier refuses."""
    stored = StoredChunks.of(engine)
    chunks = stored.selected(selection)
    keys = [entry.key for chunk in chunks for entry in stored.entries[chunk]]
    (engine.store.pin if pinned else engine.store.unpin)(*keys)
    now = StoredChunks.of(engine).entries
    refused = [entry for chunk in chunks for entry in now.get(chunk, ()) if entry.pinned != pinned]
    if refused:
        names, what = _named(entry.tier for entry in refused), "pinned" if pinned else "unpinned"
        n = len({chunk_of(entry.key) for entry in refused})
        raise APIError(
            503,
            f"{n:,} of {len(chunks):,} chunks could not be {what} in {names}, which cannot be written now; the "
            "server's log has the reason. Try again once that is mended.",
            "store",
            None,
            RETRY_S,
        )
    return len(chunks)


def delete(engine: Engine, selection: Selection) -> dict[str, Any]:
    """Delete the selected chunks from every tier, with their texts; return how many, and the bytes freed.

    A chunk that was selected by a source and that another source holds, too, is kept, and has only the other one then.

    Raises:
        APIError: A key selects nothing (404), or KV may still be stored somewhere (503).
    """
    stored = StoredChunks.of(engine)
    chunks = stored.selected(selection)
    texts = {stored.texts[chunk][0][1] for chunk in chunks if chunk in stored.texts}
    kept = set[str]()
    if selection.source:
        kept = leave_source(engine.catalog.strict, engine.digest, texts, selection.source.__eq__)
    rest = {chunk for chunk in chunks if chunk not in stored.texts}

    def forget() -> int:
        nbytes = engine.forget(sorted(texts - kept)) if texts - kept else 0
        return nbytes + forget_chunks(engine.store, engine.catalog.strict, rest)

    own = {chunk for chunk in chunks if chunk in rest or stored.texts[chunk][0][1] not in kept}
    done = freed(engine, forget, own)
    return {"object": "ragfuse.deleted", "chunks": len(chunks) - len(kept), **done, "kept": len(kept)}


def use_of(keeper: QuotaKeeper, engine: Engine) -> dict[str, Any]:
    """Return what a tenant keeps, its limits, and what was evicted for them.

    The bytes of tiers and sources are of one listing of the store: the keeper's own counts are up to a minute old.
    """
    found, stored = keeper.enforce().as_dict(), StoredChunks.of(engine)
    nbytes = _by_tier(entry for entries in stored.entries.values() for entry in entries)
    return {
        "object": "ragfuse.usage",
        **found,
        "nbytes": {tier: nbytes[tier] for tier in found["nbytes"]},
        "limits": keeper.limits(),
        "evicted": {kind: keeper.evicted[kind] for kind in ("bytes", "texts", "sessions")},
        "sources": stored.sources(),
    }


def freed(engine: Engine, forget: Callable[[], int], chunks: Set[Chunk]) -> dict[str, Any]:
    """Run a deletion; return what it freed: `nbytes` of KV, each once, and in `tiers` the bytes of all copies.

    Args:
        engine: The tenant's engine.
        forget: Deletes KV, and returns the bytes freed in all tiers.
        chunks: The chunks that it deletes.

    Raises:
        StillStored: A tier cannot be written or does not answer, so that some of it may still be stored there.
    """
    before = StoredChunks.of(engine).entries
    n_freed = forget()
    after = StoredChunks.of(engine).entries if chunks or n_freed else {}
    tiers = [entry.tier for chunk in chunks for entry in after.get(chunk, ())] + (
        engine.store.silent() if chunks else []
    )
    if tiers:
        raise StillStored(_named(tiers))
    if not n_freed:
        return {"nbytes": 0, "tiers": {}}
    left = {(entry.key, entry.tier) for entries in after.values() for entry in entries}
    gone = [each for entries in before.values() for each in entries if (each.key, each.tier) not in left]
    return {"nbytes": kv_nbytes(gone), "tiers": dict(_by_tier(gone))}


class StillStored(APIError):
    """KV that could not be deleted everywhere.

    Args:
        tiers: The tiers that may still have some of it, in words.
    """

    def __init__(self, tiers: str) -> None:
        super().__init__(
            503,
            f"KV of what was to be deleted may still be stored in {tiers}, which cannot be written now; the server's "
            "log has the reason. Delete it again once that is mended.",
            "store",
            None,
            RETRY_S,
        )


def _named(tiers: Iterable[str]) -> str:
    """Return "the tier disk", "the tiers disk and redis"."""
    names = sorted(set(tiers))
    return f"the tier{'s' if len(names) > 1 else ''} {' and '.join(names)}"


def _by_tier(entries: Iterable[Entry]) -> Counter[str]:
    """Return the bytes of entries by tier."""
    nbytes = Counter[str]()
    for entry in entries:
        nbytes[entry.tier] += entry.nbytes
    return nbytes
