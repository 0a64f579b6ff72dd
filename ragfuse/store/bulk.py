"""Many chunks at once: moved, exported, imported, dropped, and what is too old or of no use freed. Through tiers alone.

Nothing here decides which chunks. Progress is told in bytes: done, and of how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfuse.errors import StoreError
from ragfuse.store.archive import ArchivedChunk, ArchivedText, ArchiveProblem, new_archive, read_archive
from ragfuse.store.levels import loss_of, pieces_of
from ragfuse.store.store import KVStore
from ragfuse.store.tier import Freed, Tidies, Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

Progress = Callable[[int, int], object]
"""Takes the bytes done, and of how many."""

_TOLD = 100
_TEXTS = 500


@dataclass(frozen=True)
class Outcome:
    """What was done with many chunks: how many, their bytes; `known` were there already; `failed` stayed as they were.

    `troubles` names the first of those that failed, and why. `fewer_nbytes`: by how much less they take than before,
    where they were there and became something else.
    """

    chunks: int = 0
    nbytes: int = 0
    known: int = 0
    texts: int = 0
    failed: int = 0
    troubles: tuple[ArchiveProblem, ...] = ()
    fewer_nbytes: int = 0


class OutcomeBuilder:
    """An outcome in the making."""

    def __init__(self) -> None:
        self.known = self.texts = self.failed = 0
        self.done: dict[Any, int] = {}
        self.written_nbytes = self._fewer_nbytes = 0
        self._troubles: list[ArchiveProblem] = []

    def took(self, what: object, nbytes: int, before_nbytes: int) -> None:
        """One was done that takes so many bytes now."""
        self.done[what] = nbytes
        self._fewer_nbytes += before_nbytes - nbytes

    def fail(self, what: object, why: str) -> None:
        """One stays as it was."""
        self.failed += 1
        if len(self._troubles) < _TOLD:
            self._troubles.append(ArchiveProblem(str(what), why))

    def keep_only(self, kept: Iterable[Any], why: str) -> None:
        """Those done that are not there after all have failed."""
        kept = set(kept)
        for key in [key for key in self.done if key not in kept]:
            del self.done[key]
            self.fail(key, why)

    def outcome(self) -> Outcome:
        """What came of all of them."""
        nbytes, troubles = sum(self.done.values()), tuple(self._troubles)
        return Outcome(len(self.done), nbytes, self.known, self.texts, self.failed, troubles, self._fewer_nbytes)


def move(store: KVStore, keys: Iterable[ChunkKey], tier: str, progress: Progress | None = None) -> Outcome:
    """Keep chunks in `tier` and in no other. What it has no room for stays where it was, and pins go along.

    Everything is copied first and dropped from the other tiers then: stopped in between, nothing is lost.
    """
    target, tally = store.tier(tier), OutcomeBuilder()
    others = [other for other in store.tiers if other is not target]
    sources = _sources(others, keys := list(dict.fromkeys(keys)))
    there = target.entries(keys)
    pinned = {key for other in others for key, entry in other.entries(keys).items() if entry.pinned}
    done, total = 0, sum(entry.nbytes for entry in sources.values())
    for key in keys:
        if key in there and _is_as_good(there[key], sources.get(key)) and target.read(key, 0, pieces_of(there[key])):
            tally.done[key] = there[key].nbytes
        elif why := _copy(store, key, target, tally):
            tally.fail(key, why)
        if key in pinned and key in tally.done:
            target.pin([key], True)
        done += sources[key].nbytes if key in sources else 0
        _tell(progress, done, total)
    tally.keep_only(target.entries(list(tally.done)), f"tier {tier} has no room for so much")
    for other in others:
        other.delete(list(tally.done))
    return tally.outcome()


def export(
    store: KVStore,
    path: Path,
    keys: Iterable[ChunkKey] | None = None,
    texts: Iterable[ArchivedText] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Write chunks (None: all) and known texts into one file. What cannot be read is left out and told.

    StoreError, and the file as it was, where one is there already and this one would lack something, or have nothing;
    and where nothing is found while a tier does not answer.
    """
    tally = OutcomeBuilder()
    sources = _sources(store.tiers, None if keys is None else (keys := list(dict.fromkeys(keys))))
    quiet = store.silent() if keys is None or any(key not in sources for key in keys) else []
    if quiet and (not sources or path.exists()):
        raise StoreError(unanswered(quiet, f"nothing was written to '{path}'"))
    if not sources and path.exists():
        raise StoreError(f"Nothing that is meant is in the store, so '{path}' stays as it was. See: ragfuse store ls")
    done, total = 0, sum(entry.nbytes for entry in sources.values())
    for key in keys or ():
        if key not in sources:
            tally.fail(key, "it is not in the store")
    for name in quiet if keys is None else ():
        tally.fail(f"tier {name}", "it does not answer")
    with new_archive(path) as archive:
        for key, entry in sources.items():
            whole = store.read_whole(key)
            if whole is None:
                tally.fail(key, "it cannot be read")
            else:
                tally.done[key] = archive.chunk(key, *whole)
            done += entry.nbytes
            _tell(progress, done, total)
        for some in _some(texts):
            archive.texts(some)
            tally.texts += len(some)
        if tally.failed and path.exists():
            raise StoreError(_lacking(path, tally.outcome()))
    return tally.outcome()


def unanswered(names: Sequence[str], so: str) -> str:
    """That these tiers do not answer, what follows from it, and what to do."""
    whose = f"Tier {names[0]} does" if len(names) == 1 else f"Tiers {' and '.join(names)} do"
    return f"{whose} not answer: {so}. Try again once {'it answers' if len(names) == 1 else 'they answer'}."


def _lacking(path: Path, done: Outcome) -> str:
    first = done.troubles[0]
    return (
        f"'{path}' stays as it was: what was to take its place would lack {done.failed:,} of "
        f"{done.failed + done.chunks:,} entries (the first: {first.what}, {first.why}). Export again, or name another."
    )


def import_(
    store: KVStore,
    path: Path,
    tier: str | None = None,
    take_texts: Callable[[Sequence[ArchivedText]], object] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Keep the chunks of an archive, in `tier` or else in the first slow one. What is whole is kept, the rest told.

    Chunks are found again by the same model with the same dtype and salt alone. Known texts are handed to `take_texts`.
    """
    target, tally = store.tier(tier) if tier is not None else _first_slow(store), OutcomeBuilder()
    for found in read_archive(path, progress):
        if isinstance(found, ArchiveProblem):
            tally.fail(found.what, found.why)
        elif isinstance(found, list):
            if take_texts is not None:
                take_texts(found)
                tally.texts += len(found)
        elif found.key in target.entries([found.key]):
            tally.known += 1
        elif why := _take(store, found, target):
            tally.fail(found.key, why)
        else:
            tally.done[found.key] = found.nbytes
    tally.keep_only(target.entries(list(tally.done)), f"tier {target.name} has no room for so much")
    return tally.outcome()


def gc(store: KVStore) -> dict[str, Freed]:
    """Free what is too old, and what no entry needs; what was given back, by tier. One that is silent is left out.

    An entry that is too old in one tier is kept while another tier of this store has used it since.
    """
    freed = {tier.name: _old_freed(store, tier).plus(_tidied(tier)) for tier in store.tiers}
    silent = store.silent()
    return {name: found for name, found in freed.items() if name not in silent}


def _tidied(tier: Tier) -> Freed:
    return tier.tidy() if isinstance(tier, Tidies) else Freed()


def _old_freed(store: KVStore, tier: Tier) -> Freed:
    entries = tier.entries() if store.expired is not None else {}
    old = store.too_old(entries.values())
    for other in store.tiers if old else ():
        there = other.entries(old) if other is not tier else {}
        fresh = there.keys() - set(store.too_old(there.values()))
        old = [key for key in old if key not in fresh]
    old = store.too_old(tier.entries(old).values()) if old else old  # a listing takes its time: used meanwhile?
    gone = tier.delete(old) if old else 0
    left = tier.entries(old) if 0 < gone < len(old) else {}
    return Freed(expired=gone, nbytes=sum(entries[key].nbytes for key in old if key not in left) if gone else 0)


def _sources(tiers: Iterable[Tier], keys: Sequence[ChunkKey] | None) -> dict[ChunkKey, Entry]:
    """Each chunk's entry that lost least, in the first of `tiers` that has such a one."""
    found: dict[ChunkKey, Entry] = {}
    for tier in tiers:
        there = tier.entries(keys)
        found |= {key: each for key, each in there.items() if key not in found or not _is_as_good(found[key], each)}
    return found


def _is_as_good(there: Entry, other: Entry | None) -> bool:
    """Whether an entry lost no more than another one."""
    return other is None or loss_of(there.sizes) <= loss_of(other.sizes)


def _copy(store: KVStore, key: ChunkKey, target: Tier, tally: OutcomeBuilder) -> str | None:
    """Write one chunk into `target` as well; why it is not there, None if it is."""
    whole = store.read_whole(key)
    if whole is None:
        return "it is not in the store, or cannot be read"
    nbytes = whole[0].nbytes
    if tally.written_nbytes + nbytes > target.capacity or not store.write_whole(key, *whole, target):
        return f"tier {target.name} has no room for it, or does not take it"
    tally.done[key] = nbytes
    tally.written_nbytes += nbytes
    return None


def _take(store: KVStore, found: ArchivedChunk, target: Tier) -> str | None:
    """Keep a chunk of an archive; why it is not kept, None if it is."""
    if found.nbytes > target.capacity:
        return f"it takes {found.nbytes:,} bytes, tier {target.name} has {target.capacity:,} in all"
    strange = [level for level in found.meta.levels if not store.levels.readable(found.key, [level])]
    if strange:
        return f"it is written by a codec that its model has none of here ({strange[0]})"
    try:
        blobs = found.read()
        for level in found.meta.levels:
            store.levels.check(found.key, level, (found.meta, blobs))
    except (OSError, ValueError) as error:
        return str(error)[:200]
    kept = store.write_whole(found.key, found.meta, blobs, target)
    return None if kept else f"tier {target.name} has no room for it, or does not take it"


def _first_slow(store: KVStore) -> Tier:
    return next((tier for tier in store.tiers if tier.slow), store.tiers[0])


def _some(texts: Iterable[ArchivedText]) -> Iterable[list[ArchivedText]]:
    some: list[ArchivedText] = []
    for text in texts:
        some.append(text)
        if len(some) == _TEXTS:
            yield some
            some = []
    if some:
        yield some


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
