"""The write-behind queue of a store: all saves that are under way, of entries put, copied or read
from a slower tier.

Each tier has a thread, so that a slow or hanging one does not delay the others. Deleting a chunk
cancels its saves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Condition, Lock

from cachetools import LRUCache
from torch import Tensor

from ragfuse.codec import RAW
from ragfuse.process.jobs import BackgroundJobs, close_at_exit, countdown
from ragfuse.store.levels import EncodedLayers, TierLevels, loss_of
from ragfuse.store.tier import EntryMeta, Tier, Whole
from ragfuse.types.keys import ChunkKey

log = logging.getLogger("ragfuse.store")

_Partial = tuple[EntryMeta, dict[int, Tensor]]
_PARTIAL_NBYTES = 1 << 28
"""Bytes of half-read chunks that are collected where no tier is in memory; else a quarter of that
tier.
"""
_REMEMBERED = 1 << 14


class Save:
    """One entry that is being saved, encoded for a tier when it is first needed. Threads may share
    it.

    Deleting its key meanwhile cancels it, even where it is already written.

    Args:
        levels: Encodes it.
        key: The chunk.
        whole: The entry as it was given.
        wanted: Levels by tier name; tiers that are not named get the entry as it is.

    Attributes:
        meta: The description of the entry as it was given.
        barred: Names of tiers that must not get or keep it, as the chunk was deleted there since
            the save began.
        waiting: Names of tiers that it is queued for, and "" while it begins.
        stored: Names of tiers that have it.
    """

    def __init__(
        self, levels: TierLevels, key: ChunkKey, whole: Whole, wanted: Mapping[str, Sequence[str]]
    ) -> None:
        self.key, self.meta = key, whole[0]
        self.barred, self.waiting, self.stored = set[str](), {""}, set[str]()
        self._levels, self._whole, self._wanted = levels, whole, wanted
        self._lock, self._made = Lock(), dict[tuple[str, ...], Whole]()

    def is_ready(self, tier: str) -> bool:
        """Return whether a tier can get the entry without encoding anything."""
        return RAW.name not in self.meta.levels or set(self._wanted.get(tier, ())) <= set(
            self.meta.levels
        )

    def at_levels_of(self, tier: str) -> Whole:
        """Return the entry at the levels of a tier."""
        wanted = tuple(self._wanted.get(tier, self.meta.levels))
        with self._lock:
            if wanted not in self._made:
                self._made[wanted] = self._levels.at_levels(self.key, self._whole, wanted)
            return self._made[wanted]


class Saves:
    """All saves that are under way. Threads may share it; no lock is held while a tier reads or
    writes.

    A chunk that was read whole is saved to the faster tiers. A pinned chunk is pinned wherever it
    is saved to.

    Args:
        tiers: The store's tiers.
        limit: Most jobs that wait for each tier.
        levels: The codec levels of the tiers.

    Attributes:
        epoch: A number that changes with every `cancel`.
    """

    def __init__(self, tiers: Sequence[Tier], limit: int, levels: TierLevels) -> None:
        self.epoch = 0
        self._tiers, self._levels, self._closed = tuple(tiers), levels, False
        self._writers = {tier.name: BackgroundJobs(f"writer-{tier.name}", limit) for tier in tiers}
        self._changed = Condition()
        self._under_way: set[Save] = set()
        self._pins: set[ChunkKey] = set()
        limit_nbytes = max(
            (tier.capacity // 4 for tier in tiers if not tier.slow), default=_PARTIAL_NBYTES
        )
        self._partials: LRUCache[ChunkKey, _Partial] = LRUCache(
            limit_nbytes, getsizeof=lambda each: each[0].nbytes
        )
        self._reported: LRUCache[ChunkKey, float] = LRUCache(_REMEMBERED)
        close_at_exit(self)

    @property
    def dropped(self) -> int:
        """Saves that were dropped or that failed."""
        return sum(writer.dropped for writer in self._writers.values())

    def under_way(self) -> set[ChunkKey]:
        """Return the keys of chunks that are being saved or were read in part."""
        with self._changed:
            return {save.key for save in self._under_way} | set(self._partials)

    def submit(self, tier: Tier, job: Callable[[], object]) -> bool:
        """Queue housekeeping after a tier's saves; return False if the queue is full, which does
        no harm.
        """
        return self._writers[tier.name].submit(job, counts=False)

    @contextmanager
    def begin(
        self, key: ChunkKey, whole: Whole, wanted: Mapping[str, Sequence[str]]
    ) -> Iterator[Save]:
        """Begin a save (`Save`). It can be cancelled until the block and all that it has queued are
        done.
        """
        save = Save(self._levels, key, whole, wanted)
        with self._changed:
            self._under_way.add(save)
        try:
            yield save
        finally:
            self._end(save, "")

    def write(
        self,
        save: Save,
        now: Sequence[Tier] = (),
        later: Sequence[Tier] = (),
        *,
        wait: bool = False,
        pace_s: float = 0.0,
    ) -> bool:
        """Write to some tiers on this thread, and to others in the background, each on its own
        thread.

        Args:
            save: What to write.
            now: The tiers to write to on this thread.
            later: The tiers to write to in the background.
            wait: Whether to wait until all of them are written.
            pace_s: Without `wait`, seconds to wait at most until one of them has it or all have
                refused it.

        Returns:
            Whether one of these tiers has it or has it queued.
        """
        for tier in later:
            self._queue(save, tier, is_awaited=wait)
        for tier in now:
            self._write(save, tier)
        names, queued = {tier.name for tier in (*now, *later)}, {tier.name for tier in later}
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or not save.waiting & queued or (not wait and save.stored & queued)
                ),
                None if wait else pace_s,
            )
            return bool((save.waiting | (save.stored - save.barred)) & names)

    def warm(self, read: EncodedLayers, epoch: int) -> None:
        """Collect layers that were just read. Once all layers of a chunk were read, save it to the
        tiers that are faster than its own.

        Nothing is read a second time. If a tier is slow, or has to encode or copy the chunk, that
        happens in the background, so that the reader does not wait.

        Args:
            read: The layers.
            epoch: `epoch` before the read began; the layers are ignored if a `cancel` came since.
        """
        faster = self._tiers[: self._tiers.index(read.tier)]
        whole = self._collected(read, epoch) if faster else None
        if whole is None:
            return
        wanted = {tier.name: self._levels.of(tier.name) for tier in faster}
        with self.begin(read.key, (read.meta, whole), wanted) as save:
            lacking = [tier for tier in faster if self._lacks(tier, save)]
            quick = [
                tier
                for tier in lacking
                if not (tier.slow or tier.copies) and save.is_ready(tier.name)
            ]
            self.write(save, quick, [tier for tier in lacking if tier not in quick])

    def used(self, key: ChunkKey, source: Tier, now: float, every_s: float) -> None:
        """Report a use to the tiers that were not read, in the background, unless one was reported
        a while ago.

        Without these reports, a chunk that is always read from memory would look unused in the
        others.
        """
        with self._changed:
            if 0 <= now - self._reported.get(key, -every_s) < every_s:
                return
            self._reported[key] = now
        for tier in self._tiers:
            if tier is not source:
                self.submit(tier, partial(tier.touch, [key]))

    def cancel(self, keys: Collection[ChunkKey], tier: str | None = None) -> None:
        """Cancel the saves of some chunks, into all tiers or into one.

        If it is for all tiers, their pins are forgotten, too.
        """
        with self._changed:
            self.epoch += 1
            for save in self._under_way:
                if save.key in keys:
                    save.barred.update(self._writers if tier is None else [tier])
            for key in keys:
                self._partials.pop(key, None)
            if tier is None:
                self._pins.difference_update(keys)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Set whether these chunks are protected from eviction in tiers that they are saved to from
        now on.
        """
        with self._changed:
            (self._pins.update if pinned else self._pins.difference_update)(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all saves queued before now are done; return False if `timeout_s`, for all
        together, ran out.
        """
        remaining_s = countdown(timeout_s)
        done = [writer.flush(remaining_s()) for writer in self._writers.values()]
        return all(done)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the queued saves, or as many as fit in `timeout_s` seconds, and wake all threads
        that wait for one.
        """
        remaining_s = countdown(timeout_s)
        for writer in self._writers.values():
            writer.close(remaining_s())
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # inside

    def _collected(self, read: EncodedLayers, epoch: int) -> tuple[Tensor, ...] | None:
        """Return all layers of a chunk once they were read, else None. Collecting begins with layer
        0.
        """
        key, meta = read.key, read.meta
        with self._changed:
            known, parts = self._partials.get(key) or (meta, {})
            if epoch != self.epoch or known != meta or (not parts and read.first != 0):
                return None  # deleted or rewritten meanwhile, or read at another level
            self._partials.pop(key, None)
            parts |= enumerate(read.blobs, read.first)
            if len(parts) == len(meta.layers):
                return tuple(parts[at] for at in range(len(parts)))
            if meta.nbytes <= self._partials.maxsize:
                self._partials[key] = meta, parts
            return None

    def _lacks(self, tier: Tier, save: Save) -> bool:
        """Return whether a tier does not have a chunk, or only a lossier copy than it would get
        now.
        """
        there = tier.stat([save.key]).get(save.key)
        levels = self._levels.of(tier.name) if RAW.name in save.meta.levels else save.meta.levels
        return there is None or loss_of(there.sizes) > loss_of(levels)

    def _queue(self, save: Save, tier: Tier, *, is_awaited: bool) -> None:
        def job() -> None:
            try:
                self._write(save, tier)
            finally:
                self._end(save, tier.name)

        with self._changed:
            save.waiting.add(tier.name)
        if self._writers[tier.name].submit(job, is_awaited=is_awaited):
            return
        if is_awaited:  # the process ends: the caller, who waits for this save, makes it
            job()
        else:
            self._end(save, tier.name)
            message = (
                "Too many chunks wait to be saved to tier %s (setting writer_queue), so this one is"
                " not saved: %s"
            )
            log.warning(message, tier.name, save.key)

    def _write(self, save: Save, tier: Tier) -> None:
        """Write unless the chunk was deleted; delete it again if that happened meanwhile."""
        if tier.name in save.barred or not tier.put(save.key, *save.at_levels_of(tier.name)):
            return
        if save.key in self._pins:
            tier.pin([save.key], True)
        with self._changed:
            save.stored.add(tier.name)
            is_barred = tier.name in save.barred
        if is_barred:
            tier.delete([save.key])

    def _end(self, save: Save, tier: str) -> None:
        with self._changed:
            save.waiting.discard(tier)
            if not save.waiting:
                self._under_way.discard(save)
            self._changed.notify_all()
