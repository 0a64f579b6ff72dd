"""The write-behind queues of a store, with all saves in progress.

Each tier has its own thread, so a slow tier does not delay other tiers. Deleting a chunk cancels
the saves of that chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from functools import partial
from threading import Lock
from weakref import WeakSet

from cachetools import LRUCache
from torch import Tensor

from ragfuse.codec import RAW
from ragfuse.process.jobs import BackgroundJobs, countdown
from ragfuse.store.levels import EncodedLayers, TierLevels, loss_of
from ragfuse.store.tier import EntryMeta, Tier, Whole
from ragfuse.types.keys import ChunkKey

log = logging.getLogger("ragfuse.store")

_Partial = tuple[EntryMeta, dict[int, Tensor]]
_PARTIAL_NBYTES = 1 << 28
"""Maximum bytes of partly read chunks in a store without memory tiers. If a store has memory tiers,
the maximum is a quarter of the largest memory tier's capacity."""
_REMEMBERED = 1 << 14


class Save:
    """A save of one entry to several tiers; encodes the entry for each tier on demand. Thread-safe.

    `barred` names the tiers in which the chunk was deleted since the save began. In these tiers,
    the save is cancelled, and an entry that the save has already written is deleted.
    """

    def __init__(
        self, levels: TierLevels, key: ChunkKey, whole: Whole, wanted: Mapping[str, Sequence[str]]
    ) -> None:
        self.key, self.meta, self.barred = key, whole[0], set[str]()
        self._levels, self._whole, self._wanted = levels, whole, wanted
        self._lock, self._made = Lock(), dict[tuple[str, ...], Whole]()

    def write(self, tier: Tier) -> bool:
        """Write the entry to a tier, unless the chunk was deleted there. Return True on success."""
        if tier.name in self.barred or not tier.put(self.key, *self._at_levels_of(tier.name)):
            return False
        if tier.name in self.barred:
            tier.delete([self.key])
        return tier.name not in self.barred

    def _at_levels_of(self, tier: str) -> Whole:
        wanted = tuple(self._wanted.get(tier, self.meta.levels))
        with self._lock:
            if wanted not in self._made:
                self._made[wanted] = self._levels.at_levels(self.key, self._whole, wanted)
            return self._made[wanted]


class Saves:
    """All saves in progress in a store. The queue of each tier takes at most `limit` saves.

    Thread-safe; no lock is held while a tier reads or writes. A chunk that was read completely is
    saved to faster tiers. `epoch` is the number of calls to `cancel`.
    """

    def __init__(self, tiers: Sequence[Tier], limit: int, levels: TierLevels) -> None:
        self.epoch, self._lock = 0, Lock()
        self._tiers, self._levels = tuple(tiers), levels
        self._writers = {tier.name: BackgroundJobs(f"writer-{tier.name}", limit) for tier in tiers}
        self._under_way = WeakSet[Save]()  # writing threads and queued jobs keep a save alive
        limit_nbytes = max(
            (tier.capacity // 4 for tier in tiers if not tier.slow), default=_PARTIAL_NBYTES
        )
        self._partials: LRUCache[ChunkKey, _Partial] = LRUCache(
            limit_nbytes, getsizeof=lambda each: each[0].nbytes
        )
        self._reported: LRUCache[ChunkKey, float] = LRUCache(_REMEMBERED)

    def under_way(self) -> set[ChunkKey]:
        """Return the keys of chunks that are being saved, or are only partly read so far."""
        with self._lock:
            return {save.key for save in self._under_way} | set(self._partials)

    def submit(self, tier: Tier, job: Callable[[], object]) -> None:
        """Queue a housekeeping job after a tier's saves. If the queue is full, drop the job."""
        self._writers[tier.name].submit(job)

    def begin(self, key: ChunkKey, whole: Whole, wanted: Mapping[str, Sequence[str]]) -> Save:
        """Return a new save. `cancel` can stop the save until all writes of the save are done.
        `wanted` gives the codec levels by tier name.
        """
        save = Save(self._levels, key, whole, wanted)
        with self._lock:
            self._under_way.add(save)
        return save

    def queue(self, save: Save, tiers: Iterable[Tier], wait_s: float | None = 0.0) -> bool:
        """Write an entry to tiers, each tier in its own thread.

        If `wait_s` is None, wait for all tiers. Otherwise wait until one tier has the entry, but
        at most `wait_s` seconds. Return False if no tier has the entry and no write is in progress.
        """
        queued = [self._queued(save, tier, is_awaited=wait_s is None) for tier in tiers]
        awaited = [each for each in queued if each is not None]
        with suppress(TimeoutError):
            for each in as_completed(awaited, wait_s):
                if each.result() and wait_s is not None:
                    break
        return any(not each.done() or each.result() for each in awaited)

    def warm(self, read: EncodedLayers, epoch: int) -> None:
        """Collect layers that were just read, to save whole chunks to faster tiers.

        Once all layers of a chunk are read, the chunk is saved to every faster tier that lacks the
        chunk or has it only at lossier levels. Writes to a tier run in the background if the tier
        is slow, copies tensors, or needs another codec level. `epoch` is the value of
        `Saves.epoch` before the read. If `cancel` was called since then, the layers are ignored.
        """
        faster = self._tiers[: self._tiers.index(read.tier)]
        whole = self._collected(read, epoch) if faster else None
        if whole is None:
            return
        has_raw = RAW.name in read.meta.levels
        save = self.begin(
            read.key, (read.meta, whole), {tier.name: self._levels.of(tier.name) for tier in faster}
        )
        for tier in faster:
            levels = self._levels.of(tier.name) if has_raw else read.meta.levels
            there = tier.stat([read.key]).get(read.key)
            if there is not None and loss_of(there.sizes) <= loss_of(levels):
                continue
            if tier.slow or tier.copies or not set(levels) <= set(read.meta.levels):
                self.queue(save, [tier])
            else:
                save.write(tier)

    def used(self, key: ChunkKey, source: Tier, now: float, every_s: float) -> None:
        """Report a chunk's use to all tiers except `source`, at most once in `every_s` seconds."""
        with self._lock:
            if 0 <= now - self._reported.get(key, -every_s) < every_s:
                return
            self._reported[key] = now
        for tier in self._tiers:
            if tier is not source:
                self.submit(tier, partial(tier.touch, [key]))

    def cancel(self, keys: Collection[ChunkKey], tier: str | None = None) -> None:
        """Cancel the saves of some chunks, in all tiers or only in the tier called `tier`."""
        with self._lock:
            self.epoch += 1
            for save in self._under_way:
                if save.key in keys:
                    save.barred.update(self._writers if tier is None else [tier])
            for key in keys:
                self._partials.pop(key, None)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued saves are done; return False on timeout."""
        remaining_s = countdown(timeout_s)
        done = [writer.flush(remaining_s()) for writer in self._writers.values()]
        return all(done)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the queued saves. Drop the saves that are not done within `timeout_s` seconds."""
        remaining_s = countdown(timeout_s)
        for writer in self._writers.values():
            writer.close(remaining_s())

    # internal

    def _collected(self, read: EncodedLayers, epoch: int) -> tuple[Tensor, ...] | None:
        """Collect the layers that were just read, but only if layer 0 was read first. Return all
        layers of the chunk if the chunk is complete now. Otherwise return None.
        """
        key, meta = read.key, read.meta
        with self._lock:
            known, parts = self._partials.get(key) or (meta, {})
            if epoch != self.epoch or known != meta or (not parts and read.first != 0):
                return None  # deleted or rewritten since, or read at another level
            self._partials.pop(key, None)
            parts |= enumerate(read.blobs, read.first)
            if len(parts) == len(meta.layers):
                return tuple(parts[at] for at in range(len(parts)))
            if meta.nbytes <= self._partials.maxsize:
                self._partials[key] = meta, parts
            return None

    def _queued(self, save: Save, tier: Tier, *, is_awaited: bool) -> Future[bool] | None:
        queued = self._writers[tier.name].submit(partial(save.write, tier), is_awaited=is_awaited)
        if queued is None and is_awaited:  # during shutdown, write in the thread that waits
            queued = Future()
            queued.set_result(save.write(tier))
        elif queued is None:
            message = "Too many chunks wait for tier %s (setting writer_queue), so %s is not saved"
            log.warning(message, tier.name, save.key)
        return queued
