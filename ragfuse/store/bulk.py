"""Operations on many chunks: export and import them, and collect garbage.

The caller decides which chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragfuse.errors import StoreError
from ragfuse.store.archive import ArchivedChunk, ArchivedText, ArchiveProblem, new_archive, read_archive
from ragfuse.store.levels import loss_of, only
from ragfuse.store.store import KVStore
from ragfuse.store.tier import Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

Progress = Callable[[int, int], object]
"""Called with the bytes done and the bytes in all."""

_MAX_REPORTED = 100


@dataclass
class Outcome:
    """The outcome of an operation on many chunks.

    Args:
        done: The bytes of the chunks that were processed.
        known: Chunks that needed nothing, as they were there already.
        texts: Known texts that were exported or imported.
        failed: Chunks that stayed as they were.
        troubles: The first of these, with the reasons.
    """

    done: dict[ChunkKey, int] = field(default_factory=dict)
    known: int = 0
    texts: int = 0
    failed: int = 0
    troubles: list[ArchiveProblem] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """Chunks that were processed."""
        return len(self.done)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return sum(self.done.values())

    def fail(self, what: object, why: str) -> None:
        """Record a chunk that stayed as it was, and why."""
        self.failed += 1
        if self.failed <= _MAX_REPORTED:
            self.troubles.append(ArchiveProblem(str(what), why))

    def keep_only(self, tier: Tier) -> None:
        """Turn processed chunks that a tier does not have into failed ones, as they were evicted again meanwhile."""
        for key in self.done.keys() - tier.stat(self.done).keys():
            del self.done[key]
            self.fail(key, f"tier {tier.name} has too little space for all of them")


def export(
    store: KVStore,
    path: Path,
    keys: Iterable[ChunkKey] | None = None,
    texts: Iterable[ArchivedText] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Write chunks and known texts to an archive file. Chunks that cannot be read are left out and reported.

    Args:
        store: The store.
        path: The file.
        keys: The chunks; None: all.
        texts: The known texts.
        progress: Called with the bytes done and in all.

    Raises:
        StoreError: No chunk can be exported, or the file exists and the new one would lack some. Nothing is written.
    """
    tally = Outcome()
    sources = _sources(store.tiers, None if keys is None else (keys := list(dict.fromkeys(keys))))
    done, total = 0, sum(entry.nbytes for entry in sources.values())
    for key in keys or ():
        if key not in sources:
            tally.fail(key, "it is not in the store")
    for name in store.silent() if keys is None or tally.failed else ():
        tally.fail(f"tier {name}", "it does not answer")
    with new_archive(path) as archive:
        for key, entry in sources.items():
            whole = store.read_whole(key)
            if whole is None:
                tally.fail(key, "it cannot be read")
            else:
                tally.done[key] = archive.chunk(key, *whole)
            done += entry.nbytes
            _report(progress, done, total)
        tally.texts = archive.texts(list(texts))
        if not tally.done or (tally.failed and path.exists()):
            why = ", ".join(tally.troubles[0]) if tally.troubles else "there are none"
            raise StoreError(
                f"'{path}' was not replaced or written: it would lack {tally.failed:,} of "
                f"{tally.failed + tally.chunks:,} entries (the first: {why}). Export again, or name another file."
            )
    return tally


def unanswered(names: Sequence[str], consequence: str) -> str:
    """Return a message that these tiers do not answer, with the consequence and what to do."""
    subject = f"Tier {names[0]} does" if len(names) == 1 else f"Tiers {' and '.join(names)} do"
    return f"{subject} not answer: {consequence}. Try again once {'it answers' if len(names) == 1 else 'they answer'}."


def import_(
    store: KVStore,
    path: Path,
    tier: str | None = None,
    take_texts: Callable[[Sequence[ArchivedText]], object] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Import the chunks of an archive. Damaged ones are left out and reported.

    Imported chunks are only found by the same model with the same dtype and salt.

    Args:
        store: The store.
        path: The archive file.
        tier: Name of the tier to import to; None: the first slow one.
        take_texts: Called with the known texts of the archive.
        progress: Called with the bytes done and in all.

    Raises:
        StoreError: The file is no archive, or there is no tier of that name.
    """
    target, tally = store.tier(tier) if tier is not None else _first_slow(store), Outcome()
    for item in read_archive(path, progress):
        if isinstance(item, ArchiveProblem):
            tally.fail(item.what, item.why)
        elif isinstance(item, list):
            if take_texts is not None:
                take_texts(item)
                tally.texts += len(item)
        elif item.key in target.stat([item.key]):
            tally.known += 1
        elif why := _import_chunk(store, item, target):
            tally.fail(item.key, why)
        else:
            tally.done[item.key] = item.meta.nbytes
    tally.keep_only(target)
    return tally


@dataclass(frozen=True)
class Freed:
    """What was removed from a tier: expired entries, what no entry needed, and the bytes of both."""

    expired: int = 0
    leftovers: int = 0
    nbytes: int = 0


def gc(store: KVStore) -> dict[str, Freed]:
    """Collect garbage: delete expired entries, and what no entry needs.

    An entry that has expired in one tier is kept while another tier of this store has a more recent use of it. Remote
    tiers expire entries by themselves.

    Returns:
        What was freed since the store was opened, by tier name; tiers that do not answer are left out.
    """
    freed = dict[str, Freed]()
    for tier in store.tiers:
        n_expired, nbytes = (0, 0) if tier.remote else _delete_expired(store, tier)
        tier.tidy()
        freed[tier.name] = Freed(n_expired, tier.counts["leftovers"], nbytes + tier.counts["freed"])
    silent = store.silent()
    return {name: tier_freed for name, tier_freed in freed.items() if name not in silent}


def _delete_expired(store: KVStore, tier: Tier) -> tuple[int, int]:
    old = set(store.too_old(tier.list()))
    for other in store.tiers if old else ():
        there = other.stat(old)  # also of this tier: one may have been used while listing
        old -= there.keys() - set(store.too_old(there.values()))
    nbytes = sum(entry.nbytes for entry in tier.stat(old).values())
    n_deleted = tier.delete(old) if old else 0
    return n_deleted, nbytes if n_deleted else 0


def _sources(tiers: Iterable[Tier], keys: Sequence[ChunkKey] | None) -> dict[ChunkKey, Entry]:
    """Return the least lossy entry of each chunk, from the first of `tiers` that has it."""
    found: dict[ChunkKey, Entry] = {}
    for tier in tiers:
        for entry in tier.list() if keys is None else tier.stat(keys).values():
            other = found.get(entry.key)
            if other is None or loss_of(entry.sizes) < loss_of(other.sizes):
                found[entry.key] = entry
    return found


def _import_chunk(store: KVStore, chunk: ArchivedChunk, target: Tier) -> str | None:
    """Import a chunk of an archive; return None if that worked, else the reason."""
    try:
        for level in chunk.meta.levels:
            meta, blobs = only((chunk.meta, chunk.blobs), level)
            store.levels.decoded(chunk.key, level, blobs, meta.layers)
    except ValueError as error:
        return str(error)[:200]
    is_written = store.write_whole(chunk.key, chunk.meta, chunk.blobs, target)
    return None if is_written else f"tier {target.name} has no space for it, or did not accept it"


def _first_slow(store: KVStore) -> Tier:
    return next((tier for tier in store.tiers if tier.slow), store.tiers[0])


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
