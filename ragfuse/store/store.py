"""KVStore: chunks' KV over tiers, fastest first. With `levels.py` the only user of codecs.

It finds, reads, saves, moves and forgets. What to read, from where, and whom to drop is decided by its callers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from ragfuse.codec import RAW
from ragfuse.errors import StoreError
from ragfuse.store.level_reader import EncodedLayers, LevelReader
from ragfuse.store.levels import TABLELESS, Codecs, EntryContent, TierLevels, loss_of, only, pieces_of
from ragfuse.store.saves import Saves
from ragfuse.store.tier import Breaks, Counts, EntryMeta, Expects, Expired, Tier, Whole, answers
from ragfuse.store.uses import Uses
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import ChunkKV, Entry, LayerKV

log = logging.getLogger("ragfuse.store")


@dataclass(frozen=True)
class StoreStats:
    """What a store did since it was opened, and what each tier holds now, in bytes.

    `corrupt` entries were dropped because they could not be read; `dropped_writes` were skipped because the queue was
    full, no room could be made, or the medium refused; `expired` ones were found too old when they were looked up;
    `promoted` ones were copied to a faster slow tier because they are hit often.
    """

    hits: int
    misses: int
    corrupt: int
    evicted: int
    dropped_writes: int
    nbytes: Mapping[str, int]
    capacity: Mapping[str, int]
    expired: int = 0
    promoted: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


class KVStore:
    """Chunks' KV in `tiers`. Threads may share it; no lock is held while a tier reads or writes.

    Nothing here raises for an entry: what cannot be read is a miss, what cannot be written is counted and logged.
    `expired` tells which entries are too old; without it none ever is. What is used in one tier grows old in no other:
    they are told in the background, of a chunk once in `tell_every_s` seconds.

    levels: the codec levels that each tier is written in, raw where nothing is said. An entry holds all of its tier's,
    what loses least first. codecs: how they are encoded and decoded; levels without one are not there.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        codecs: Codecs = TABLELESS,
        levels: Mapping[str, Sequence[str]] | None = None,
        *,
        writer_queue: int = 64,
        expired: Expired | None = None,
        tell_every_s: float = 600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tiers, self.expired, self._clock = tuple(tiers), expired, clock
        self.levels = TierLevels(codecs, levels)
        self._reading = LevelReader(self.levels)
        if len({tier.name for tier in self.tiers}) < len(self.tiers):
            raise StoreError(f"Tiers need different names; found: {self._names()}. Give each its own.")
        self._saves, self._counts, self._closed = Saves(self.tiers, writer_queue, self.levels), Counts(), False
        self.tell_every_s, self._uses = tell_every_s, Uses(self.tiers, self._later)

    # finding and reading

    def lookup(self, keys: Iterable[ChunkKey], counts: bool = True) -> dict[ChunkKey, Entry]:
        """Those of `keys` that are kept, each from the fastest tier that has it; one query per tier.

        Only levels that can be decoded here are told of, and nothing of an entry that has none of these. What is too
        old is a miss, and dropped in the background. Unless it `counts`, no hit or miss is told in `stats`.
        """
        wanted = dict.fromkeys(keys)
        found: dict[ChunkKey, Entry] = {}
        self._reading.forget(wanted)
        for tier in () if self._closed else self.tiers:
            missing = [key for key in wanted if key not in found]
            if missing:
                found.update(self._fresh(tier, self._readable(tier, tier.entries(missing))))
        self._counts.add("hits", counts * len(found))
        self._counts.add("misses", counts * (len(wanted) - len(found)))
        return {key: found[key] for key in wanted if key in found}

    def copies(self, found: Mapping[ChunkKey, Entry]) -> dict[ChunkKey, list[Entry]]:
        """What further tiers have of these entries, where that may have lost less or come sooner; one query per tier.

        Nothing is asked where everything is raw.
        """
        copies: dict[ChunkKey, list[Entry]] = {}
        for at, tier in enumerate(() if self._closed else self.tiers):
            before = {each.name for each in self.tiers[:at]}
            wanted = [key for key, entry in found.items() if entry.tier in before and self._may_gain(entry, tier)]
            for key, entry in self._readable(tier, tier.entries(wanted)).items() if wanted else ():
                copies.setdefault(key, []).append(entry)
        return copies

    def why_not(self, key: ChunkKey) -> str:
        """Why an entry that a look-up has met was not told of: it cannot be decoded here; "" where none was met."""
        return self._reading.why_not(key)

    def read_layers(
        self, key: ChunkKey, first: int, count: int = 1, tier: str | None = None, level: str | None = None
    ) -> tuple[LayerKV, ...] | None:
        """`count` layers from `first` on, from `tier` or else from the fastest that has them; None if none can.

        level: the one that is read; where no tier has it, one that loses less; for None, the best that can be decoded.
        The tensors are shared: they must not be written to. A chunk read whole from a slow tier enters the fast ones,
        at their own levels where it was read raw, else at the level that was read.
        """
        epoch, others, most = self._saves.epoch, list[Tier](), loss_of((level,) if level else ())
        sources = () if self._closed else sorted(self.tiers, key=lambda candidate: candidate.name != tier)
        for source, wanted in chain(((each, level) for each in sources), ((each, None) for each in others)):
            found = self._reading.layers(source, key, first, count, wanted)
            if found is not None and found.meta is None:
                others += [source] if wanted is not None else []
            elif found is not None and found.meta is not None and loss_of(found.meta.levels) <= most:
                if first == 0:
                    self._uses.note(key, source.name, self._clock(), self.tell_every_s)
                if source is not self.tiers[0]:
                    self._saves.promote(key, first, found.meta, found.blobs, epoch)
                return found.layers
        return None

    def read_encoded(self, key: ChunkKey, first: int, count: int, tier: str, level: str) -> EncodedLayers | None:
        """Layers at one level of one tier, not decoded, or None. Fast tiers get them where nothing loses less."""
        source, epoch = self.tier(tier), self._saves.epoch
        found = None if self._closed else self._reading.encoded(source, key, first, count, level)
        if found is not None and first == 0:
            self._uses.note(key, source.name, self._clock(), self.tell_every_s)
        if found is not None and source is not self.tiers[0] and self._reading.is_best(tier, key, level):
            self._saves.promote(key, first, found.meta, found.blobs, epoch)
        return found

    def expect(self, tier: str, keys: Iterable[ChunkKey], first: int, count: int, level: str | None = None) -> None:
        """Tell a tier which layers will be read soon, so that it may bring them."""
        for each in self.tiers:
            if each.name == tier and isinstance(each, Expects):
                for begin, some in self._reading.begins(tier, keys, level).items():
                    with suppress(Exception):  # a hint: what is wrong shows when it is read
                        each.expect(some, begin + first, count)

    def entries(self) -> list[Entry]:
        """All entries of all tiers; a chunk kept in two tiers comes twice."""
        return [entry for tier in self.tiers for entry in tier.entries().values()]

    def stats(self) -> StoreStats:
        """Counts since opening, bytes now."""
        refused = sum(tier.counts["refused"] + tier.counts["failed"] for tier in self.tiers)
        return StoreStats(
            hits=self._counts["hits"],
            misses=self._counts["misses"],
            corrupt=sum(tier.counts["corrupt"] for tier in self.tiers),
            evicted=sum(tier.counts["evicted"] for tier in self.tiers),
            dropped_writes=self._saves.writers.dropped + self._saves.writers.failed + refused,
            nbytes={tier.name: tier.nbytes for tier in self.tiers},
            capacity={tier.name: tier.capacity for tier in self.tiers},
            expired=self._counts["expired"],
            promoted=sum(tier.counts["promoted"] for tier in self.tiers),
        )

    def is_persistent(self, key: ChunkKey) -> bool:
        """Whether a slow tier has the entry or is about to, or none answers that could take it."""
        slow = [tier for tier in self.tiers if tier.slow and not (isinstance(tier, Breaks) and tier.breaker.is_open)]
        return not slow or key in self.under_way() or any(key in tier.entries([key]) for tier in slow)

    def tier(self, name: str) -> Tier:
        """The tier of that name; StoreError, with those there are, if there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise StoreError(f"The store has no tier {name!r}; it has: {self._names()}.")

    # saving and forgetting

    def put(
        self,
        key: ChunkKey,
        kv: ChunkKV,
        tier: str | None = None,
        wait: bool = False,
        fast: bool = True,
        home: str | None = None,
        pace_s: float = 0.0,
        levels: Mapping[str, Sequence[str]] | None = None,
    ) -> bool:
        """Keep `kv`, in every tier or in one: in fast ones at once, in slow ones in the background.

        Each tier gets it at its own levels, or those that `levels` names for it; what is slow is encoded in the
        background, too.

        With `wait`, slow tiers are written before it returns, all at the same time; else it returns when the first of
        them has it, or after `pace_s`, so that who saves much does not run ahead of all of them. Unless `fast`, fast
        tiers get it only when it is read, or where no slow one takes it. home: the one slow tier that gets it; the
        others do if it does not take it, and all if it is None. True if the chunk is kept or queued somewhere.
        """
        tiers = self.tiers if tier is None else (self.tier(tier),)
        if self._closed or not tiers:
            return False
        blobs = tuple(RAW.encode(layer, at).cpu() for at, layer in enumerate(kv.layers))
        quick, slow = [each for each in tiers if not each.slow], [each for each in tiers if each.slow]
        meant = [each for each in slow if each.name == home] or slow
        wanted = {each.name: self.levels.of(each.name) for each in tiers} | dict(levels or {})
        raw = EntryMeta.of(kv, RAW.name, blobs), blobs
        with self._saves.begun(key, EntryContent(self.levels, key, raw, wanted)) as save:
            write = self._saves.together if wait else partial(self._saves.later, pace_s=pace_s)
            kept = fast and self._saves.now(save, quick)
            taken = write(save, meant) or (meant != slow and write(save, [each for each in slow if each not in meant]))
            return kept or taken or (not fast and self._saves.now(save, quick))

    def delete(self, key: ChunkKey) -> bool:
        """Forget one chunk everywhere, also one that is still being saved; whether there was one."""
        return self._delete({key}) > 0

    def forget(self, keys: Iterable[ChunkKey], tier: str | None = None) -> int:
        """Forget these everywhere, or in one tier alone, also those still being saved; how many there were."""
        keys = set(keys)
        if tier is None:
            return self._delete(keys)
        target = self.tier(tier)
        self._saves.cancel(keys, tier)
        return target.delete(keys)

    def drop(self, keys: Iterable[ChunkKey], tier: str | None = None) -> dict[str, set[ChunkKey]]:
        """The same; each tier that could not do so, with those that may still be in it."""
        meant = set(keys)
        targets = self.tiers if tier is None else (self.tier(tier),)
        failed = {target.name: target.counts["failed"] for target in targets}
        self.forget(meant, tier)
        return {
            target.name: _still_in(target, meant)
            for target in targets
            if target.counts["failed"] > failed[target.name] or not answers(target)
        }

    def under_way(self) -> set[ChunkKey]:
        """Keys of what is being saved, or has begun to be read: it may be in no tier yet."""
        return self._saves.keys()

    def silent(self) -> list[str]:
        """Names of tiers that do not answer now: what they hold is not listed, and not known."""
        return [tier.name for tier in self.tiers if not answers(tier)]

    def clear(self, model: str | None = None) -> int:
        """Forget every chunk of a model digest (a tenant's, if salted), or all; how many there were."""
        keys = self.under_way()
        keys.update(entry.key for entry in self.entries())
        return self._delete({key for key in keys if model in (None, key.model)})

    def pin(self, *keys: ChunkKey) -> None:
        """Protect chunks from eviction, in every tier they are or come in; on disk until unpinned or deleted."""
        self._saves.pin(keys, True)
        for tier in self.tiers:
            tier.pin(keys, True)

    def unpin(self, *keys: ChunkKey) -> None:
        """Let chunks be evicted again."""
        self._saves.pin(keys, False)
        for tier in self.tiers:
            tier.pin(keys, False)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything put so far is written; False if that took too long."""
        return self._saves.writers.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what is queued and let go of files. Afterwards everything is a miss. Calling it again does nothing."""
        self._closed = True
        self._saves.close(timeout_s)
        for tier in self.tiers:
            if hasattr(tier, "close"):
                tier.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # whole entries as bytes, for `bulk.py`

    def read_whole(self, key: ChunkKey) -> Whole | None:
        """Description and pieces of the entry that lost least, from the fastest tier that can give all of them."""
        found = [(tier, entry) for tier in self.tiers for entry in tier.entries([key]).values()]
        for tier, entry in sorted(found, key=lambda pair: loss_of(pair[1].sizes)):
            whole = self.whole_in(tier, entry)
            if whole is not None:
                return whole
        return None

    def whole_in(self, tier: Tier, entry: Entry) -> Whole | None:
        """Description and pieces of an entry as its own tier tells of it; None if that cannot give all of them."""
        read = tier.read(entry.key, 0, pieces_of(entry))
        return (read[0], read[1:]) if read is not None and len(read) == 1 + len(read[0].layers) else None

    def promote(self, key: ChunkKey) -> bool:
        """Keep what slower tiers have in the first one too, at its own levels; False if it cannot be read or kept."""
        first = self.tiers[0] if self.tiers and not self._closed else None
        if first is None or key in first.entries([key]):
            return first is not None
        whole = self.read_whole(key)
        best = self.levels.best(key, whole[0].levels, None) if whole is not None else None
        if whole is None or best is None:
            return False
        return self._kept(
            EntryContent(self.levels, key, only(whole, best), {first.name: self.levels.of(first.name)}), first
        )

    def write_whole(self, key: ChunkKey, meta: EntryMeta, blobs: tuple[Tensor, ...], tier: Tier) -> bool:
        """Keep them in one tier as they are, unless the chunk is deleted meanwhile."""
        return self._kept(EntryContent(self.levels, key, (meta, blobs), {}), tier)

    def too_old(self, entries: Collection[Entry]) -> list[ChunkKey]:
        """Keys of those that are too old to be kept now."""
        return list(self.expired(entries, self._clock())) if self.expired is not None else []

    # inside

    def _names(self) -> str:
        return ", ".join(tier.name for tier in self.tiers) or "none"

    def _kept(self, content: EntryContent, tier: Tier) -> bool:
        with self._saves.begun(content.key, content) as save:
            return self._saves.now(save, [tier])

    def _may_gain(self, entry: Entry, tier: Tier) -> bool:
        is_finer = loss_of(self.levels.of(tier.name)) < loss_of(entry.sizes)
        return is_finer or (self.levels.is_mixed and self.tier(entry.tier).slow)

    def _readable(self, tier: Tier, entries: Mapping[ChunkKey, Entry]) -> dict[ChunkKey, Entry]:
        """Those that can be decoded here, with the levels that can; others are left alone."""
        sizes = self._reading.readable(tier.name, entries)
        return {key: replace(entries[key], sizes=sizes[key]) for key in sizes}

    def _fresh(self, tier: Tier, entries: dict[ChunkKey, Entry]) -> dict[ChunkKey, Entry]:
        """Without those that are too old, which are dropped later: an answer does not wait for it."""
        old = self.too_old(entries.values())
        if old:
            self._counts.add("expired", len(old))
            self._later(tier.name, lambda: tier.delete(self.too_old(tier.entries(old).values())))
        return {key: entry for key, entry in entries.items() if key not in old}

    def _later(self, tier: str, job: Callable[[], object]) -> bool:
        """Run what is no save behind a tier's saves; False if too much waits there, which is no loss."""
        return self._saves.writers.submit(tier, job, counts=False)

    def _delete(self, keys: Collection[ChunkKey]) -> int:
        """Cancel first, delete then: nothing that was under way comes back."""
        under_way = self._saves.cancel(keys)
        there = under_way.union(*(tier.entries(keys) for tier in self.tiers))
        for tier in self.tiers:
            tier.delete(keys)
        return len(there)


def _still_in(tier: Tier, keys: set[ChunkKey]) -> set[ChunkKey]:
    """Those that a tier in trouble still has; all of them if it does not say."""
    found = set(tier.entries(keys))
    return found if answers(tier) else keys
