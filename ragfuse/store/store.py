"""`KVStore` saves and reads the KV of chunks in several tiers, fastest first.

Callers choose the entries to read, the tier of each entry, and the eviction policy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from ragfuse.codec import RAW
from ragfuse.errors import StoreError
from ragfuse.plan.evict import expired
from ragfuse.store.levels import OWNER, EncodedLayers, TierLevels, loss_of
from ragfuse.store.saves import Saves
from ragfuse.store.tier import EntryMeta, Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import ChunkKV, Entry, LayerKV

log = logging.getLogger("ragfuse.store")


@dataclass(frozen=True)
class Forgotten:
    """The result of a deletion.

    Args:
        entries: The entries that were deleted.
        silent: Names of tiers that failed or did not respond, and may still store the entries.
    """

    entries: Sequence[Entry]
    silent: Sequence[str]

    @property
    def nbytes(self) -> int:
        """Bytes of the deleted entries."""
        return sum(entry.nbytes for entry in self.entries)


class KVStore:
    """The KV cache of chunks, stored in one or more tiers.

    Thread-safe; no lock is held while a tier reads or writes. A problem with a single entry never
    raises: an unreadable entry is a miss, and a failed write is counted and logged.

    Args:
        tiers: The tiers, fastest first, with distinct names.
        levels: Codec levels written to each tier, by tier name. A tier that is not named here
            gets "raw". Every entry is stored at all levels of its tier, least lossy first.
        writer_queue: Maximum number of saves that wait for one tier. Further saves are dropped,
            unless a caller waits for them.
        ttl_s: Seconds without use after which an entry expires. None means never.
        clock: Returns the time in seconds since the epoch.

    Attributes:
        levels: The codec levels of every tier, and the codecs for these levels.
        report_every_s: Minimum seconds between two reports of a chunk's use. A report goes to the
            tiers from which the chunk was not read. Without reports, a chunk that is always read
            from memory would be evicted from all other tiers.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        levels: Mapping[str, Sequence[str]] | None = None,
        *,
        writer_queue: int = 64,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tiers, self._ttl_s, self._clock = tuple(tiers), ttl_s, clock
        self.levels = TierLevels(self.tiers, levels)
        self._saves, self._closed = Saves(self.tiers, writer_queue, self.levels), False
        self.report_every_s = 600.0 if ttl_s is None else min(600.0, ttl_s / 8)

    # lookup and reads

    def lookup(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Entry]:
        """Find which of `keys` are stored, with at most one query per tier.

        An expired entry counts as a miss and is deleted in the background.

        Args:
            keys: The keys to look up.

        Returns:
            For each key found, the entry in the fastest tier that can serve the key. An entry
            lists only the codec levels that can be decoded. An entry without such a level is left
            out, and `levels.why_not` gives the reason.
        """
        wanted = dict.fromkeys(keys)
        found: dict[ChunkKey, Entry] = {}
        for tier in () if self._closed else self.tiers:
            missing = [key for key in wanted if key not in found]
            if missing:
                found.update(self._fresh(tier, self.levels.readable(tier.stat(missing))))
        return {key: found[key] for key in wanted if key in found}

    def read_layers(
        self,
        key: ChunkKey,
        first: int,
        count: int = 1,
        tier: str | None = None,
        level: str | None = None,
    ) -> tuple[LayerKV, ...] | None:
        """Read and decode consecutive layers of a chunk.

        Once all layers are read at the least lossy level that can be decoded, the chunk is copied
        into faster tiers. A chunk that was read raw is copied at the levels of each faster tier.
        Any other chunk is copied at the level that was read.

        Args:
            key: The chunk.
            first: The first layer to read, from 0.
            count: Number of layers to read.
            tier: Name of the tier to try first; the other tiers follow, fastest first.
            level: Codec level to read. If no tier has this level, a less lossy level is read. None
                means the entry's least lossy decodable level.

        Returns:
            One `LayerKV` per layer, or None if no tier can provide all of the layers. The tensors
            are shared: do not write to them.
        """
        epoch, layers = self._saves.epoch, range(first, first + count)
        sources = (
            () if self._closed else sorted(self.tiers, key=lambda candidate: candidate.name != tier)
        )
        max_loss = loss_of((level,) if level else ())
        for wanted, source in product(dict.fromkeys((level, None)), sources):
            found = self.levels.read(source, key, layers, wanted)
            if found is not None and loss_of(found.meta.levels) <= max_loss:
                with suppress(ValueError):
                    decoded = tuple(found.decoded(layers))
                    self._was_read(found, epoch)
                    return decoded
        return None

    def read_encoded(
        self, key: ChunkKey, first: int, count: int, tier: str, level: str
    ) -> EncodedLayers | None:
        """Read layers of a chunk from one tier, without decoding. Return None if the read fails.

        Once all layers are read at the least lossy level that can be decoded, the chunk is copied
        into every faster tier that does not have the chunk at this level or a less lossy level.

        Raises:
            StoreError: The store has no tier called `tier`.
        """
        source, epoch = self.tier(tier), self._saves.epoch
        found = (
            None
            if self._closed
            else self.levels.read(source, key, range(first, first + count), level)
        )
        if found is not None:
            self._was_read(found, epoch)
        return found

    def entries(self) -> list[Entry]:
        """Return all entries of chunks. A chunk in several tiers has one entry per tier."""
        listed = (entry for tier in self.tiers for entry in tier.list())
        return [entry for entry in listed if entry.key.model != OWNER]

    def is_persistent(self, key: ChunkKey) -> bool:
        """Return True if a slow tier has the chunk or will get it, or if no slow tier responds."""
        slow = [tier for tier in self.tiers if tier.slow and tier.answers]
        return (
            not slow
            or key in self._saves.under_way()
            or any(key in tier.stat([key]) for tier in slow)
        )

    def tier(self, name: str) -> Tier:
        """Return the tier called `name`. Raise StoreError if the store has no such tier."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        names = ", ".join(tier.name for tier in self.tiers) or "none"
        raise StoreError(f"The store has no tier {name!r}. Use one of: {names}.")

    # saves and deletions

    def put(
        self,
        key: ChunkKey,
        kv: ChunkKV,
        tier: str | None = None,
        wait: bool = False,
        slow_tier: str | None = None,
        pace_s: float = 0.0,
        levels: Mapping[str, Sequence[str]] | None = None,
    ) -> bool:
        """Save the KV of a chunk: to fast tiers at once, to slow tiers in the background.

        KV for slow tiers is also encoded in the background.

        Args:
            key: The chunk.
            kv: The KV of the chunk, on any device.
            tier: Name of the only tier to save to. None means all tiers.
            wait: True to wait until all slow tiers are written (in parallel).
            slow_tier: Name of the slow tier to save to. The other slow tiers are used only if this
                tier does not take the chunk. None means all slow tiers.
            pace_s: Maximum seconds to wait for the first slow tier that finishes, if `wait` is
                False. The wait keeps a caller with many chunks from getting far ahead of the tiers.
            levels: Codec levels by tier name, in place of the store's levels for these tiers.

        Returns:
            True if the chunk is stored in, or queued for, at least one tier.

        Raises:
            StoreError: The store has no tier called `tier`.
        """
        tiers = self.tiers if tier is None else (self.tier(tier),)
        if self._closed or not tiers:
            return False
        blobs = RAW.encode_all(kv.layers)
        quick = [each for each in tiers if not each.slow]
        slow = [each for each in tiers if each.slow]
        targets = [each for each in slow if each.name == slow_tier] or slow
        wanted = {each.name: self.levels.of(each.name) for each in tiers} | dict(levels or {})
        raw = EntryMeta.of(kv, RAW.name, blobs), blobs
        save = self._saves.begin(key, raw, wanted)
        is_stored = sum(save.write(each) for each in quick) > 0
        others = [each for each in slow if each not in targets]
        wait_s = None if wait else pace_s
        queue = self._saves.queue
        return queue(save, targets, wait_s) or queue(save, others, wait_s) or is_stored

    def forget(self, keys: Iterable[ChunkKey], tier: str | None = None) -> Forgotten:
        """Delete chunks, pinned or not, from `tier` or from all tiers. Cancel pending saves too.

        Raises:
            StoreError: The store has no tier called `tier`.
        """
        doomed = set(keys)
        targets = self.tiers if tier is None else (self.tier(tier),)
        failed = {target.name: target.counts["failed"] for target in targets}
        self._saves.cancel(doomed, tier)  # first: a pending save would write a deleted chunk again
        entries = [entry for target in targets for entry in target.stat(doomed).values()]
        for target in targets:
            target.delete(doomed)
        silent = [
            each.name
            for each in targets
            if each.counts["failed"] > failed[each.name] or not each.answers
        ]
        return Forgotten([entry for entry in entries if entry.tier not in silent], silent)

    def all_keys(self) -> set[ChunkKey]:
        """Return the keys of all chunks, including chunks that are being saved or read."""
        under_way = self._saves.under_way()  # first, as a save may end while entries are listed
        return under_way | {entry.key for entry in self.entries()}

    def silent(self) -> list[str]:
        """Return the names of the tiers that do not respond now. `entries()` omits these tiers."""
        return [tier.name for tier in self.tiers if not tier.answers]

    def clear(self, model: str | None = None) -> Forgotten:
        """Delete all chunks, or only the chunks of `model`, a digest of model and tenant."""
        return self.forget(key for key in self.all_keys() if model in (None, key.model))

    def pin(self, keys: Collection[ChunkKey], pinned: bool = True) -> None:
        """Pin or unpin chunks in every tier; only pins on disk outlive the process."""
        for tier in self.tiers:
            tier.pin(keys, pinned)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued saves are done. Return False on timeout; None means no timeout."""
        return self._saves.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the queued saves and close the tiers. Later lookups are misses. Idempotent.

        Args:
            timeout_s: Seconds after which queued saves are dropped. None means no timeout.
        """
        self._closed = True
        self._saves.close(timeout_s)
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def too_old(self, entries: Collection[Entry]) -> list[ChunkKey]:
        """Return the keys of the expired entries among `entries`."""
        return [] if self._ttl_s is None else [*expired(entries, self._clock(), self._ttl_s)]

    # internal

    def _was_read(self, found: EncodedLayers, epoch: int) -> None:
        if found.first == 0:
            self._saves.used(found.key, found.tier, self._clock(), self.report_every_s)
        if found.is_best:
            self._saves.warm(found, epoch)

    def _fresh(self, tier: Tier, entries: dict[ChunkKey, Entry]) -> dict[ChunkKey, Entry]:
        """Return the unexpired entries; delete the expired entries in the background."""
        old = self.too_old(entries.values())
        if old:
            self._saves.submit(tier, lambda: tier.delete(self.too_old(tier.stat(old).values())))
        return {key: entry for key, entry in entries.items() if key not in old}
