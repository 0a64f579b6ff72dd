"""Times a tier with random KV of a model's shape, written, read back and deleted again."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from ragfuse.errors import StoreError
from ragfuse.load.layers import CPU, is_far
from ragfuse.measure.fit import fitted
from ragfuse.store import DiskTier, KVStore, Tier
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.profiles import TierSpeed, Warmth

MAX_ENTRY_NBYTES, MAX_ENTRY_TOKENS = 16 << 20, 1024
"""The largest entry that is written, whichever is smaller."""
ENTRY_SHARES = (1 / 16, 1 / 4, 1)
"""Sizes of entries, of the largest."""
LAYERS = (4, 1, 0)
"""Layers that are read at a time; 0: all."""
TIER_BUDGET_S, MIN_ENTRIES = 15.0, 4
"""No further entry is written after so long, unless these are too few."""
UNLIMITED = 1 << 60

Progress = Callable[[str, float], object]


@dataclass(frozen=True)
class TierTiming:
    """One entry: reads it took, its bytes, seconds to write and to read it, bytes that a medium gave for that.

    fetched: None where the system does not say.
    """

    reads: int
    nbytes: int
    write_s: float
    read_s: float
    fetched: int | None = None


def speed_of(
    tier: Tier,
    sample: ChunkKV,
    rounds: int,
    progress: Progress,
    cool: Callable[[], object] | None = None,
    device: torch.device = CPU,
) -> TierSpeed:
    """The tier's speed for KV like `sample`, which is one token's; StoreError if it does not keep what it is given."""
    with _scratch(tier) as (used, chill):
        points = _points(used, sample, rounds, lambda done: progress(f"tier {tier.name}", done), cool or chill)
    open_s, read_s, byte_s = fitted([(1, p.reads, p.nbytes) for p in points], [p.read_s for p in points])
    write_s, write_byte_s = fitted([(1, p.nbytes) for p in points], [p.write_s for p in points])
    kept = tuple((p.reads, p.nbytes, p.read_s) for p in points)
    reads = warmth(points, is_local=isinstance(tier, DiskTier) or cool is not None) if tier.slow else "warm"
    return TierSpeed(open_s, read_s, byte_s, write_s, write_byte_s, is_far(tier, device), kept, reads)


def warmth(points: Sequence[TierTiming], is_local: bool) -> Warmth:
    """Whether entries came from the medium: by the bytes it gave to this process, where the system counts them.

    Where pages cannot be dropped at all, what was just written is read from memory. Nothing is known of what another
    machine keeps in its own.
    """
    if not is_local:
        return "unknown"
    counted = [(point.fetched, point.nbytes) for point in points if point.fetched is not None]
    if not counted:
        return "unknown" if hasattr(os, "posix_fadvise") else "warm"
    return "cold" if 2 * sum(fetched for fetched, _ in counted) >= sum(nbytes for _, nbytes in counted) else "warm"


def fetched_nbytes() -> int | None:
    """Bytes that disks have given to this process so far; None where the system does not say, or counts nothing."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:")) or None
    except (OSError, ValueError, StopIteration):
        return None


def forget_pages(folder: Path) -> None:
    """Let the system drop what it holds in memory of the entries below `folder`, where it can be told to.

    What is not on the medium yet is brought there: until then it cannot be dropped.
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
    """The tier, or one of its own for a disk: on the same medium, where nothing is pushed out and pages can go."""
    if not isinstance(tier, DiskTier):
        yield tier, lambda: None
        return
    with TemporaryDirectory(prefix="measure-", dir=tier.path, ignore_cleanup_errors=True) as folder:
        own = DiskTier(folder, UNLIMITED, lambda entries: (), name=tier.name)
        try:
            yield own, lambda: forget_pages(Path(folder))
        finally:
            own.close()


def _points(
    tier: Tier, sample: ChunkKV, rounds: int, progress: Callable[[float], object], cool: Callable[[], object]
) -> list[TierTiming]:
    """Entries of all sizes in turn, smallest first, each read in several ways: the median of each over the rounds."""
    largest, began = _largest(tier, sample), time.perf_counter()
    sizes = [max(1, round(largest * share)) for share in ENTRY_SHARES]
    chunks = {n: _random(sample, n) for n in sizes}
    cases = [(n, count or len(sample.layers)) for n in sizes for count in LAYERS]
    taken: dict[tuple[int, int], list[TierTiming]] = {}
    _timed(tier, chunks[sizes[0]], 1, cool)  # to warm up
    for turn in range(rounds):
        for index, (n, count) in enumerate(cases):
            if len(taken) >= MIN_ENTRIES and time.perf_counter() - began > TIER_BUDGET_S:
                break
            progress((turn + index / len(cases)) / rounds)
            taken.setdefault((n, count), []).append(_timed(tier, chunks[n], count, cool))
    return [_median(points) for points in taken.values()]


def _median(points: list[TierTiming]) -> TierTiming:
    """The same entry's points as one."""
    write_s, read_s = (median(times) for times in zip(*((p.write_s, p.read_s) for p in points), strict=True))
    counted = [point.fetched for point in points if point.fetched is not None]
    return replace(points[0], write_s=write_s, read_s=read_s, fetched=int(median(counted)) if counted else None)


def _largest(tier: Tier, sample: ChunkKV) -> int:
    """Tokens of the largest entry; StoreError where there is no room for a small one without pushing others out."""
    free = tier.capacity - tier.nbytes
    tokens = min(MAX_ENTRY_TOKENS, max(1, MAX_ENTRY_NBYTES // sample.nbytes), free // (2 * sample.nbytes))
    if tokens < 1:
        raise StoreError(f"Tier {tier.name} has {free:,} bytes left, too few to measure it. Make room or give it more.")
    return tokens


def _random(sample: ChunkKV, n: int) -> ChunkKV:
    """KV of `n` tokens of the sample's shape."""
    drawn = torch.Generator().manual_seed(n)

    def like(part: torch.Tensor) -> torch.Tensor:
        return torch.randn((part.shape[0], n, part.shape[2]), generator=drawn).to(part.dtype)

    return ChunkKV(tuple(LayerKV(like(layer.keys), like(layer.values)) for layer in sample.layers))


def _timed(tier: Tier, kv: ChunkKV, count: int, cool: Callable[[], object]) -> TierTiming:
    """Write an entry, read it by `count` layers at a time, cold if that can be, and delete it, whatever happens."""
    store, key = KVStore([tier]), ChunkKey(digest("measure"), secrets.token_hex(16))
    try:
        began = time.perf_counter()
        kept = store.put(key, kv, wait=True)
        write_s = time.perf_counter() - began
        cool()
        firsts, before = range(0, len(kv.layers), count), fetched_nbytes()
        began = time.perf_counter()
        whole = all(store.read_layers(key, at, min(count, len(kv.layers) - at)) is not None for at in firsts)
        read_s, after = time.perf_counter() - began, fetched_nbytes()
    finally:
        tier.delete([key])
    if not (kept and whole):
        raise StoreError(f"Tier {tier.name} did not keep {kv.nbytes:,} bytes that were written. Is it full, or down?")
    fetched = after - (before or 0) if after is not None else None
    return TierTiming(len(firsts), kv.nbytes, write_s, read_s, fetched)
