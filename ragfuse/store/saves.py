"""Saves that are under way: entries being put, moved or warmed into tiers. Deleting a chunk cancels its saves.

`store.py` decides what goes into which tier, `writer.py` has the background queues, `partial.py` half-read chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition

from torch import Tensor

from ragfuse.codec import RAW
from ragfuse.store.levels import EntryContent, TierLevels, loss_of
from ragfuse.store.partial import PartialReads
from ragfuse.store.tier import EntryMeta, Tier
from ragfuse.store.writer import Writers
from ragfuse.types.keys import ChunkKey

log = logging.getLogger("ragfuse.store")

_PARTIAL_NBYTES = 1 << 30
"""Four times the bytes of half-read chunks that are collected where no tier is in memory."""


@dataclass(eq=False, slots=True)
class Save:
    """One entry that is being saved. Deleting its key meanwhile cancels it, even where it is already written.

    Args:
        key: The chunk.
        content: What is saved, at the levels of each tier.
        barred: Names of tiers that must not get or keep it, as the chunk was deleted there since the save began.
        waiting: Names of tiers that it is queued for.
        stored_in: Names of those queued tiers that stored it.
        holders: How many parties (the caller, queued jobs) still need this object.
    """

    key: ChunkKey
    content: EntryContent
    barred: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    stored_in: set[str] = field(default_factory=set)
    holders: int = 0


class Saves:
    """All saves that are under way. Threads may share it; no lock is held while a tier reads or writes.

    A chunk that was read whole is saved to the faster tiers. A pinned chunk is pinned in every tier
    that it is saved to.

    Args:
        tiers: The store's tiers.
        writer_queue: Most saves that wait for each tier in the background.
        levels: The codec levels of the tiers.
    """

    def __init__(self, tiers: Sequence[Tier], writer_queue: int, levels: TierLevels) -> None:
        self._tiers, self._names, self._levels = tuple(tiers), [tier.name for tier in tiers], levels
        self.writers = Writers(self._names, writer_queue)
        self._closed = False
        self._pins: set[ChunkKey] = set()
        self._lock = Condition()
        self._under_way: set[Save] = set()
        self._partials = PartialReads(
            max((tier.capacity for tier in tiers if not tier.slow), default=_PARTIAL_NBYTES) // 4
        )

    @property
    def epoch(self) -> int:
        """A number that changes with every `cancel`."""
        with self._lock:
            return self._partials.epoch

    def keys(self) -> set[ChunkKey]:
        """Return the keys of chunks that are being saved or were read in part."""
        with self._lock:
            return {save.key for save in self._under_way} | self._partials.keys()

    @contextmanager
    def begin(self, key: ChunkKey, content: EntryContent) -> Iterator[Save]:
        """Begin a save. It can be cancelled until the block and all that it has queued are done."""
        save = Save(key, content)
        self._hold(save)
        try:
            yield save
        finally:
            self._release(save)

    def write_now(self, save: Save, tiers: Iterable[Tier]) -> bool:
        """Write to `tiers` on this thread, undo it if cancelled meanwhile, and return whether any of them has it."""
        written = {tier.name for tier in tiers if self._admit(save, tier) and self._write(save, tier)}
        with self._lock:
            return bool(written - save.barred)

    def write_parallel(self, save: Save, tiers: Sequence[Tier]) -> bool:
        """Write to all `tiers` in parallel, wait for them, and return whether any of them has it."""
        for tier in tiers[1:]:
            self._queue(save, tier, is_awaited=True)
        is_stored = self.write_now(save, tiers[:1])
        with self._lock:
            self._lock.wait_for(lambda: not save.waiting or self._closed)
            return is_stored or bool(save.stored_in - save.barred)

    def write_later(self, save: Save, tiers: Iterable[Tier], pace_s: float = 0.0) -> bool:
        """Write to `tiers` in the background, each on its own thread.

        Args:
            save: What to write.
            tiers: Where to.
            pace_s: Seconds to wait at most; returns earlier once one tier has it or all have refused it.

        Returns:
            Whether any tier has it or has it queued.
        """
        for tier in tiers:
            self._queue(save, tier)
        with self._lock:
            self._lock.wait_for(lambda: save.stored_in or not save.waiting or self._closed, pace_s)
            return bool(save.waiting or save.stored_in - save.barred)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the queued saves, or as many as fit in `timeout_s` seconds, and wake all threads that wait for one."""
        self.writers.close(timeout_s)
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def warm(
        self, key: ChunkKey, source: Tier, first: int, meta: EntryMeta, blobs: Sequence[Tensor], epoch: int
    ) -> None:
        """Collect layers that were just read; once a chunk is complete, save it to the tiers before its own.

        Nothing is read a second time. If a tier is slow, or has to encode or copy the chunk, that happens in the
        background, so that the reader does not wait.

        Args:
            key: The chunk.
            source: The tier that they were read from.
            first: Index of the first of these layers.
            meta: The description of the whole chunk at the level that was read.
            blobs: The encoded layers.
            epoch: `epoch` before the read began; the layers are ignored if a `cancel` came since.
        """
        faster = self._tiers[: self._tiers.index(source)]
        if not faster:
            return
        with self._lock:
            whole = self._partials.add(key, first, meta, blobs, epoch)
            if whole is None:
                return
            levels = {tier.name: self._levels.of(tier.name) for tier in faster}
            content = EntryContent(self._levels, key, whole, levels)
            save = Save(key, content, holders=1)
            self._under_way.add(save)
        with suppress(Exception):
            lacking = [tier for tier in faster if self._lacks(tier, key, content)]
            quick = [
                tier
                for tier in lacking
                if not tier.slow and content.is_ready(tier.name) and not getattr(tier, "copies", False)
            ]
            self.write_now(save, quick)
            self.write_later(save, [tier for tier in lacking if tier not in quick])
        self._release(save)

    def cancel(self, keys: Collection[ChunkKey], tier: str | None = None) -> set[ChunkKey]:
        """Cancel the saves of some chunks, into all tiers or into one.

        If it is for all tiers, their pins are forgotten, too.

        Returns:
            The keys of those chunks that were being saved.
        """
        with self._lock:
            found = [save for save in self._under_way if save.key in keys]
            for save in found:
                save.barred.update(self._names if tier is None else [tier])
            self._partials.discard(keys)
            if tier is None:
                self._pins.difference_update(keys)
            return {save.key for save in found}

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Set whether these chunks are protected from eviction in tiers that they are saved to from now on."""
        with self._lock:
            (self._pins.update if pinned else self._pins.difference_update)(keys)

    def _lacks(self, tier: Tier, key: ChunkKey, content: EntryContent) -> bool:
        """Return whether a tier does not have a chunk, or only a lossier copy than it would get now."""
        there = tier.entries([key]).get(key)
        levels = self._levels.of(tier.name) if RAW.name in content.meta.levels else content.meta.levels
        return there is None or loss_of(there.sizes) > loss_of(levels)

    def _admit(self, save: Save, tier: Tier) -> bool:
        """Return whether a tier may get the entry. If so, older saves of the key may stay there, too: same KV."""
        with self._lock:
            if tier.name in save.barred:
                return False
            for other in self._under_way:
                if other.key == save.key:
                    other.barred.discard(tier.name)
            return True

    def _write(self, save: Save, tier: Tier) -> bool:
        """Write, and delete again if the chunk was deleted meanwhile, unless a newer save has written it since."""
        is_stored = self._written(save, tier)
        while is_stored and self._is_barred(save, tier):
            tier.delete([save.key])
            is_stored = not self._is_barred(save, tier) and self._written(save, tier)
        return is_stored

    def _written(self, save: Save, tier: Tier) -> bool:
        is_stored = tier.write(save.key, *save.content.of(tier.name))
        if is_stored and save.key in self._pins:
            tier.pin([save.key], True)
        return is_stored

    def _is_barred(self, save: Save, tier: Tier) -> bool:
        with self._lock:
            return tier.name in save.barred

    def _queue(self, save: Save, tier: Tier, is_awaited: bool = False) -> None:
        def job() -> None:
            stored_in = set[str]()
            try:
                stored_in.update([tier.name] if self.write_now(save, [tier]) else [])
            finally:
                self._release(save, {tier.name}, stored_in)

        self._hold(save, {tier.name})
        if not self.writers.submit(tier.name, job, is_awaited=is_awaited):
            self._release(save, {tier.name})
            log.warning(
                "Too many chunks wait to be saved to tier %s (setting writer_queue), so this one is not saved: %s",
                tier.name,
                save.key,
            )

    def _hold(self, save: Save, waiting: Set[str] = frozenset()) -> None:
        with self._lock:
            save.holders += 1
            save.waiting |= waiting
            self._under_way.add(save)

    def _release(self, save: Save, waiting: Set[str] = frozenset(), stored_in: Set[str] = frozenset()) -> None:
        with self._lock:
            save.waiting -= waiting
            save.stored_in |= stored_in
            self._lock.notify_all()
            save.holders -= 1
            if not save.holders:
                self._under_way.discard(save)
