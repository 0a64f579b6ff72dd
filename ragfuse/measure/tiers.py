"""Time a tier with random KV of a model's shape, which is written, read back and deleted again."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ragfuse.errors import StoreError
from ragfuse.load.layers import CPU, is_far
from ragfuse.measure.fit import fitted
from ragfuse.measure.medians import Progress, medians
from ragfuse.store import DiskTier, KVStore, Tier
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.profiles import TierSpeed
from ragfuse.types.sizes import UNLIMITED

MAX_ENTRY_NBYTES, MAX_ENTRY_TOKENS = 16 << 20, 1024
"""Limits on the size of the largest entry that is written, in bytes and in tokens; the smaller one applies."""
ENTRY_SHARES = (1 / 16, 1 / 4, 1)
"""Sizes of the entries, as shares of the largest."""
LAYERS = (4, 1, 0)
"""Layers that are read at a time; 0: all."""
TIER_BUDGET_S = 15.0
"""Seconds after which no further round of reads begins."""


def speed_of(
    tier: Tier,
    sample: ChunkKV,
    rounds: int,
    progress: Progress,
    cool: Callable[[], object] | None = None,
    device: torch.device = CPU,
) -> TierSpeed:
    """Time a tier with entries of several sizes, each read in several ways.

    Args:
        tier: The tier.
        sample: One token's KV, for the shape.
        rounds: Rounds of each timing.
        progress: Called as the timings proceed.
        cool: Called before each read, to empty caches so that the read is cold. Disk tiers do not need it.
        device: The model's device.

    Raises:
        StoreError: The tier does not store what is written to it, or has no room.
    """
    cases, table = dict[str, Callable[[], float]](), dict[str, tuple[int, int]]()
    n_layers = len(sample.layers)
    with _scratch(tier) as (timed_tier, make_cold):
        largest = _largest(timed_tier, sample)
        for n in [max(1, round(largest * share)) for share in ENTRY_SHARES]:
            kv = _random(sample, n)
            for count in (min(count, n_layers) or n_layers for count in LAYERS):
                name = f"tier {tier.name}, {n} tokens, {count} layers a read"
                cases[name] = partial(_timed, timed_tier, kv, count, cool or make_cold)
                table[name] = -(-n_layers // count), kv.nbytes
        next(iter(cases.values()))()  # to warm up
        seconds = medians(cases, rounds, progress, TIER_BUDGET_S)
    read_s, byte_s = fitted(list(table.values()), list(seconds.values()))
    return TierSpeed(read_s, byte_s, is_far(tier, device))


def forget_pages(folder: Path) -> None:
    """Drop the cached pages of all entries below `folder`, where the system supports it.

    Entries are synced to the medium first, as pages that are not written yet cannot be dropped.
    """
    for path in folder.rglob("*.kv") if hasattr(os, "posix_fadvise") else ():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@contextmanager
def _scratch(tier: Tier) -> Iterator[tuple[Tier, Callable[[], object]]]:
    """Yield the tier to time, and a function that makes its next read cold.

    For a disk tier it is a temporary tier in the same folder, where nothing is evicted and pages can be dropped.
    """
    if not isinstance(tier, DiskTier):
        yield tier, lambda: None
        return
    with TemporaryDirectory(prefix="measure-", dir=tier.path, ignore_cleanup_errors=True) as folder:
        scratch = DiskTier(folder, UNLIMITED, lambda entries: (), name=tier.name)
        try:
            yield scratch, lambda: forget_pages(Path(folder))
        finally:
            scratch.close()


def _largest(tier: Tier, sample: ChunkKV) -> int:
    """Return the tokens of the largest entry; raise StoreError if even a small one would evict others."""
    free = tier.capacity - tier.nbytes
    tokens = min(MAX_ENTRY_TOKENS, max(1, MAX_ENTRY_NBYTES // sample.nbytes), free // (2 * sample.nbytes))
    if tokens < 1:
        raise StoreError(
            f"Tier {tier.name} has {free:,} bytes left, too few to time it. Delete entries or raise its capacity."
        )
    return tokens


def _random(sample: ChunkKV, n: int) -> ChunkKV:
    """Return random KV of `n` tokens of the sample's shape."""
    generator = torch.Generator().manual_seed(n)

    def like(part: torch.Tensor) -> torch.Tensor:
        return torch.randn((part.shape[0], n, part.shape[2]), generator=generator).to(part.dtype)

    return ChunkKV(tuple(LayerKV(like(layer.keys), like(layer.values)) for layer in sample.layers))


def _timed(tier: Tier, kv: ChunkKV, count: int, cool: Callable[[], object]) -> float:
    """Write an entry, read it `count` layers at a time (cold, if possible), and delete it in any case."""
    store, key = KVStore([tier]), ChunkKey(digest("measure"), secrets.token_hex(16))
    try:
        stored = store.put(key, kv, wait=True)
        cool()
        firsts = range(0, len(kv.layers), count)
        began = time.perf_counter()
        all_read = all(store.read_layers(key, at, min(count, len(kv.layers) - at)) is not None for at in firsts)
        seconds = time.perf_counter() - began
    finally:
        tier.delete([key])
    if not (stored and all_read):
        raise StoreError(
            f"Tier {tier.name} did not store {kv.nbytes:,} bytes: it may be full or down. See: ragfuse store ls"
        )
    return seconds
