"""Entries on their way into tiers: put, moved or promoted, at once or in the background. Deleting them cancels them.

Bytes only. `store.py` decides what goes where; work waits in `writer.py`, half-read chunks in `partial.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition

from torch import Tensor

from ragfuse.codec import RAW
from ragfuse.process.fork import at_fork
from ragfuse.store.levels import EntryContent, TierLevels, loss_of
from ragfuse.store.partial import PartialReads
from ragfuse.store.tier import EntryMeta, Tier
from ragfuse.store.writer import Writers
from ragfuse.types.keys import ChunkKey

log = logging.getLogger("ragfuse.store")


@dataclass(eq=False, slots=True)
class Save:
    """An entry on its way. Deleting its key meanwhile cancels it, whatever it has written.

    barred: tiers that it may not enter, or stay in, as it was deleted there since it began. waiting: tiers that it is
    queued for; kept: those of them that took it. holders: how many are not done with it.
    """

    key: ChunkKey
    content: EntryContent
    barred: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    holders: int = 0


class Saves:
    """What is on its way into `tiers`. Threads may share it; no lock is held while a tier reads or writes.

    A chunk that is read whole from a slower tier enters the fast ones. What is pinned is so in every tier it comes in.
    """

    def __init__(self, tiers: Sequence[Tier], writer_queue: int, levels: TierLevels) -> None:
        self._names = [tier.name for tier in tiers]
        self.writers = Writers(self._names, writer_queue)
        self._fast, self._levels = [tier for tier in tiers if not tier.slow], levels
        self._closed = False
        self._pins: set[ChunkKey] = set()
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Nothing is on its way: what was, a process that was forked brings."""
        self._lock = Condition()
        self._under_way: set[Save] = set()
        self._partials = PartialReads(max((tier.capacity for tier in self._fast), default=0) // 4)

    @property
    def epoch(self) -> int:
        """A number that changes with every cancelling."""
        with self._lock:
            return self._partials.epoch

    def keys(self) -> set[ChunkKey]:
        """Chunks that are under way, and those that have begun to be read."""
        with self._lock:
            return {save.key for save in self._under_way} | self._partials.keys()

    @contextmanager
    def begun(self, key: ChunkKey, content: EntryContent) -> Iterator[Save]:
        """A save that can be cancelled from now on, until the block and all it has queued are done."""
        save = Save(key, content)
        self._hold(save)
        try:
            yield save
        finally:
            self._let_go(save)

    def now(self, save: Save, tiers: Iterable[Tier]) -> bool:
        """Write into `tiers`, and take out again what is cancelled; whether one of them keeps it."""
        kept = {tier.name for tier in tiers if self._enters(save, tier) and self._write(save, tier)}
        with self._lock:
            return bool(kept - save.barred)

    def together(self, save: Save, tiers: Sequence[Tier]) -> bool:
        """Write into all `tiers` at the same time, and wait for them; whether one of them keeps it."""
        for tier in tiers[1:]:
            self._queue(save, tier, is_awaited=True)
        kept = self.now(save, tiers[:1])
        with self._lock:
            self._lock.wait_for(lambda: not save.waiting or self._closed)
            return kept or bool(save.kept - save.barred)

    def later(self, save: Save, tiers: Iterable[Tier], pace_s: float = 0.0) -> bool:
        """Write into `tiers` in the background, each by its own thread; False if none takes it.

        Returns when the first of them has it, or none has, after `pace_s` at the latest.
        """
        for tier in tiers:
            self._queue(save, tier)
        with self._lock:
            self._lock.wait_for(lambda: save.kept or not save.waiting or self._closed, pace_s)
            return bool(save.waiting or save.kept - save.barred)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what is queued, or as much of it as `timeout_s` allows. Afterwards nobody waits for anything."""
        self.writers.close(timeout_s)
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def promote(self, key: ChunkKey, first: int, meta: EntryMeta, blobs: Sequence[Tensor], epoch: int) -> None:
        """Keep bytes just read at one level; once a chunk is whole it enters the fast tiers, without a second read.

        What of it is to be encoded first, or copied, its reader does not wait for.
        """
        with self._lock:
            whole = self._partials.add(key, first, meta, blobs, epoch)
            if whole is None:
                return
            content = EntryContent(
                self._levels, key, whole, {tier.name: self._levels.of(tier.name) for tier in self._fast}
            )
            save = Save(key, content, holders=1)
            self._under_way.add(save)
        with suppress(Exception):
            lacking = [tier for tier in self._fast if self._lacks(tier, key, content)]
            quick = [tier for tier in lacking if content.is_ready(tier.name) and not getattr(tier, "copies", False)]
            self.now(save, quick)
            self.later(save, [tier for tier in lacking if tier not in quick])
        self._let_go(save)

    def cancel(self, keys: Collection[ChunkKey], tier: str | None = None) -> set[ChunkKey]:
        """Nothing of these that is under way comes in, or into one tier; those that were being saved.

        No pin of theirs is kept, unless it is for one tier alone.
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
        """Whether these are protected from eviction wherever they come in from now on."""
        with self._lock:
            (self._pins.update if pinned else self._pins.difference_update)(keys)

    def _lacks(self, tier: Tier, key: ChunkKey, content: EntryContent) -> bool:
        """Whether a tier has nothing of a chunk, or what lost more than its own levels of this would."""
        there = tier.entries([key]).get(key)
        levels = self._levels.of(tier.name) if RAW.name in content.meta.levels else content.meta.levels
        return there is None or loss_of(there.sizes) > loss_of(levels)

    def _enters(self, save: Save, tier: Tier) -> bool:
        """Whether it may be written there now. Then older saves of the key may stay too: they bring the same KV."""
        with self._lock:
            if tier.name in save.barred:
                return False
            for other in self._under_way:
                if other.key == save.key:
                    other.barred.discard(tier.name)
            return True

    def _write(self, save: Save, tier: Tier) -> bool:
        """Write, and take out again what was deleted meanwhile; but not what a younger save has brought since."""
        kept = self._written(save, tier)
        while kept and self._is_barred(save, tier):
            tier.delete([save.key])
            kept = not self._is_barred(save, tier) and self._written(save, tier)
        return kept

    def _written(self, save: Save, tier: Tier) -> bool:
        kept = tier.write(save.key, *save.content.of(tier.name))
        if kept and save.key in self._pins:
            tier.pin([save.key], True)
        return kept

    def _is_barred(self, save: Save, tier: Tier) -> bool:
        with self._lock:
            return tier.name in save.barred

    def _queue(self, save: Save, tier: Tier, is_awaited: bool = False) -> None:
        def job() -> None:
            kept = set[str]()
            try:
                kept.update([tier.name] if self.now(save, [tier]) else [])
            finally:
                self._let_go(save, {tier.name}, kept)

        self._hold(save, {tier.name})
        if not self.writers.submit(tier.name, job, is_awaited=is_awaited):
            self._let_go(save, {tier.name})
            log.warning("Not saved, too much is waiting to enter tier %s: %s", tier.name, save.key)

    def _hold(self, save: Save, waiting: Set[str] = frozenset()) -> None:
        with self._lock:
            save.holders += 1
            save.waiting |= waiting
            self._under_way.add(save)

    def _let_go(self, save: Save, waiting: Set[str] = frozenset(), kept: Set[str] = frozenset()) -> None:
        with self._lock:
            save.waiting -= waiting
            save.kept |= kept
            self._lock.notify_all()
            save.holders -= 1
            if not save.holders:
                self._under_way.discard(save)
