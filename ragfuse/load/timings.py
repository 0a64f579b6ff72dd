"""Time one model on this machine: full prefill, fused prefill, codecs and tiers. The result is a
`CostModel`.

Tokens and KV are random, as speed does not depend on the text. Every figure is the median of
interleaved rounds after a warm-up.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ragfuse.codec import Codec, LayerMeta
from ragfuse.errors import ModelError, StoreError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.fuse.select import cost_of
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.load.layers import CPU, is_far
from ragfuse.plan.cost import Blend, CostModel, RowCost, TierCost
from ragfuse.process.jobs import EXIT_S
from ragfuse.store import DiskTier, KVStore, Tier
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.sizes import UNLIMITED

log = logging.getLogger("ragfuse.load")

MAX_TIMED_TOKENS = 3072
"""Tokens of the longest prompt that is timed, unless the model's context is shorter."""
LENGTH_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Lengths at which full prefill is timed, as shares of the longest."""
PASS_BUDGET_S, MIN_LENGTHS = 12.0, 4
"""After a prefill of more than PASS_BUDGET_S seconds no longer prompt is timed, once there are
MIN_LENGTHS lengths.
"""
TIMED_CHUNKS = 6
FUSED_LENGTH_SHARES, QUESTION_TOKENS = (1 / 8, 1 / 3, 1), (16, 96)
"""Lengths at which fused prefills are timed, as shares of the longest; and the tokens of their
questions, in turn.
"""
BLENDS = (
    ("none", 0.0),
    ("lego", 0.15),
    ("lego", 0.5),
    ("hkvd", 0.05),
    ("hkvd", 0.15),
    ("hkvd", 0.4),
    ("query", 0.05),
    ("query", 0.3),
)
"""(policy, ratio) of the fused prefills that are timed: some of each kind of policy."""
DECODED_TOKENS = 256
"""Tokens of the chunk whose decoding is timed, unless the model's context is shorter."""
MAX_ENTRY_NBYTES, MAX_ENTRY_TOKENS = 16 << 20, 1024
"""Limits on the size of the largest entry that is written to a tier; the smaller one applies."""
ENTRY_SHARES, LAYERS = (1 / 16, 1 / 4, 1), (4, 1, 0)
"""Sizes of the entries, as shares of the largest; and the layers of each that are read at a time, 0
for all.
"""
TIER_BUDGET_S = 15.0
"""Seconds after which no further round of reads of a tier begins."""
MIN_TIMED_S = 1e-9
"""Smallest timing in seconds: a coarse clock may measure 0, and errors are divided by the timing.
"""
_NOTHING = 1e-50

Progress = Callable[[str, float], object]
"""Called with a description of the current timing, and the share of all timings that is done (0 to
1).
"""
Cases = Mapping[str, Callable[[], float]]
"""What is timed, by its description; each returns how many seconds it took."""


def measure(
    model: HFModel,
    tiers: Sequence[Tier],
    progress: Progress = lambda what, done: None,
    longest: int = MAX_TIMED_TOKENS,
    rounds: int = 3,
    cool: Callable[[], object] | None = None,
    codecs: Callable[[str], Codec | None] = lambda level: None,
) -> CostModel:
    """Time a model on this machine, which takes minutes at most.

    A tier that does not store what is written to it is left out with a warning.

    Args:
        model: The model.
        tiers: The tiers to time.
        progress: Called as the timings proceed.
        longest: Tokens of the longest prompt to time.
        rounds: Rounds of each timing.
        cool: Called before each read of a tier, to empty caches so that the read is cold. Disk
            tiers do not need it.
        codecs: Returns the codec of a level, or None; decoding is timed for levels with a codec.

    Raises:
        ModelError: The model's KV cannot be reused, so there is nothing to time.
    """
    if model.profile.refusal:
        raise ModelError(
            f"{model.name} cannot reuse stored KV, so there is nothing to time:"
            f" {model.profile.refusal}"
        )
    n_parts = 3 + len(tiers)

    def part(number: int) -> Progress:
        return lambda what, done: progress(what, (number + done) / n_parts)

    prefill = _prefill_points(model, min(longest, model.max_context or longest), rounds, part(0))
    blends, fused_s = _fused_points(model, prefill[-1][0], rounds, part(1))
    fused = fitted([blend.features(model.n_layers) for blend in blends], fused_s)
    decode, packed = _decoding(model, codecs, rounds, part(2))
    costs, sample = dict[str, TierCost](), model.encode([0])
    for index, tier in enumerate(tiers):
        try:
            costs[tier.name] = tier_cost(tier, sample, rounds, part(3 + index), cool, model.device)
        except StoreError as error:
            log.warning(
                "Tier %s was not timed, so there are no timings of it: %s", tier.name, error
            )
    return CostModel(
        model=model.fingerprint,
        device=str(model.device),
        threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        n_layers=model.n_layers,
        prefill=RowCost(
            *fitted([(1, n, n * n) for n, _ in prefill], [seconds for _, seconds in prefill])
        ),
        fused=RowCost(*fused[:3]),
        placed_s=fused[3],
        tiers=costs,
        prefill_points=prefill,
        decode=decode,
        packed=packed,
    )


def fitted(table: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Find the non-negative weights of the columns whose weighted sums are closest to `seconds`, by
    relative error.

    All subsets of the columns are tried, and the best least-squares solution without a negative
    weight is taken, so the result is exact. Of columns that are proportional to each other, the
    first gets the whole weight. A column of values near zero gets the weight 0.

    Args:
        table: One row of features per timing.
        seconds: The timings.

    Returns:
        One weight per column.
    """
    rows = torch.tensor(table, dtype=torch.float64)
    rows = rows / torch.tensor(seconds, dtype=torch.float64).clamp_min(MIN_TIMED_S)[:, None]
    scale = rows.abs().amax(0)
    rows, scale = torch.where(scale > _NOTHING, rows, 0.0), scale.clamp_min(_NOTHING)
    wanted, n = torch.ones(len(rows), 1, dtype=torch.float64), rows.shape[1]
    best, weights = float(len(rows)), torch.zeros(n, dtype=torch.float64)
    for chosen in (list(each) for size in range(1, n + 1) for each in combinations(range(n), size)):
        columns = rows[:, chosen] / scale[chosen]
        found = torch.linalg.lstsq(columns, wanted, driver="gelsd").solution
        error = float((columns @ found - wanted).square().sum())
        if bool(((found >= 0) & found.isfinite()).all()) and error < best * (1 - 1e-9):
            best, weights = error, torch.zeros(n, dtype=torch.float64)
            weights[chosen] = found[:, 0] / scale[chosen]
    return tuple(float(weight) for weight in weights)


def _medians(cases: Cases, rounds: int, progress: Progress, budget_s: float = inf) -> list[float]:
    """Return the median seconds of each case; each round runs all cases once, and none begins after
    `budget_s`.
    """
    timings: dict[str, list[float]] = {name: [] for name in cases}
    began = time.perf_counter()
    for round_index in range(rounds):
        if round_index and time.perf_counter() - began > budget_s:
            break
        for index, (name, case) in enumerate(cases.items()):
            progress(name, (round_index + index / len(cases)) / rounds)
            timings[name].append(case())
    return [median(seconds) for seconds in timings.values()]


# the model


def _prefill_points(
    model: HFModel, max_tokens: int, rounds: int, progress: Progress
) -> tuple[tuple[int, float], ...]:
    """Time full prefills of up to `max_tokens` tokens; return (tokens, median seconds), shortest
    first.
    """
    ids, cases, lengths = _ids(model, max_tokens), dict[str, Callable[[], float]](), list[int]()
    for length in sorted({max(1, round(max_tokens * share)) for share in LENGTH_SHARES}):
        case = partial(_seconds, model, partial(model.full_prefill, ids[:length]))
        cases[f"full prefill, {length} tokens"] = case
        lengths.append(length)
        if case() > PASS_BUDGET_S and len(cases) >= MIN_LENGTHS:  # to warm up
            break
    return tuple(zip(lengths, _medians(cases, rounds, progress), strict=True))


def _fused_points(
    model: HFModel, max_tokens: int, rounds: int, progress: Progress
) -> tuple[list[Blend], Sequence[float]]:
    """Time fused prefills of each policy, length and ratio, with KV in host memory (so a GPU's
    includes the copy).

    The first of their chunks is a prefix, so its KV is exact.

    Returns:
        The rows that each computes, and its median seconds.
    """
    cases, blends = dict[str, Callable[[], float]](), list[Blend]()
    for share in FUSED_LENGTH_SHARES:
        tokens = max(TIMED_CHUNKS + 2, round(max_tokens * share))
        ids, positions = _ids(model, tokens), torch.arange(tokens)
        for number, (policy, ratio) in enumerate(BLENDS):
            question = max(1, min(QUESTION_TOKENS[number % len(QUESTION_TOKENS)], tokens // 4))
            size = (tokens - question) // TIMED_CHUNKS
            runs = [
                CachedRun(at, at * size, (at + 1) * size, at * size, blend=at > 0)
                for at in range(TIMED_CHUNKS)
            ]
            source = KVSource([_in_host_memory(model, ids[:size])] * TIMED_CHUNKS)
            case = partial(model.fuse, ids, positions, runs, source, policy, ratio)
            share_computed = min(1.0, case().mean_ratio)  # to warm up
            cases[f"fused prefill, {policy} {ratio:.0%}, {tokens} tokens"] = partial(
                _seconds, model, case
            )
            forced, candidates = tokens - TIMED_CHUNKS * size, (TIMED_CHUNKS - 1) * size
            blends.append(Blend(cost_of(policy), tokens, forced, candidates, share_computed))
    return blends, _medians(cases, rounds, progress)


def _decoding(
    model: HFModel, codecs: Callable[[str], Codec | None], rounds: int, progress: Progress
) -> tuple[dict[str, float], dict[str, float]]:
    """Time the decoding of each level on this thread and from host memory, which is how entries are
    decoded.

    Returns:
        By level, median seconds to decode one token's KV; and by level, encoded bytes over raw
        bytes. Levels without a codec, or that cannot encode this model's KV, are left out.
    """
    kv = _in_host_memory(
        model, _ids(model, min(DECODED_TOKENS, model.max_context or DECODED_TOKENS))
    )
    cases, packed = dict[str, Callable[[], float]](), dict[str, float]()
    for level in LEVEL_NAMES[1:]:
        if (codec := codecs(level)) is None:
            continue
        try:
            blobs = [codec.encode(layer, at) for at, layer in enumerate(kv.layers)]
        except ValueError:  # KV that only the raw codec can store
            continue
        metas = [LayerMeta.of(layer, blob) for layer, blob in zip(kv.layers, blobs, strict=True)]
        cases[level] = partial(_seconds, model, partial(_decode, codec, blobs, metas))
        cases[level]()  # to warm up
        packed[level] = sum(blob.numel() for blob in blobs) / kv.nbytes
    found = _medians(cases, rounds, lambda level, done: progress(f"decoding {level}", done))
    return {
        level: seconds / kv.n_tokens for level, seconds in zip(cases, found, strict=True)
    }, packed


def _in_host_memory(model: HFModel, ids: list[int]) -> ChunkKV:
    """Return the KV of a text as a memory tier returns it, whatever device it was computed on."""
    layers = model.encode(ids).layers
    return ChunkKV(
        tuple(LayerKV(kv.keys.cpu().contiguous(), kv.values.cpu().contiguous()) for kv in layers)
    )


def _ids(model: HFModel, count: int) -> list[int]:
    """Return random token ids, the same in every run."""
    vocabulary, generator = (
        model.model.config.get_text_config().vocab_size,
        torch.Generator().manual_seed(0),
    )
    return [int(token) for token in torch.randint(vocabulary, (count,), generator=generator)]


def _decode(codec: Codec, blobs: list[Tensor], metas: list[LayerMeta]) -> None:
    for blob, meta in zip(blobs, metas, strict=True):
        codec.decode(blob, meta)


def _seconds(model: HFModel, case: Callable[[], object]) -> float:
    """Return the seconds of one run, including the work that it started on a GPU."""

    def synchronized() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    began = synchronized()
    case()
    return synchronized() - began


# tiers


def tier_cost(
    tier: Tier,
    sample: ChunkKV,
    rounds: int,
    progress: Progress,
    cool: Callable[[], object] | None = None,
    device: torch.device = CPU,
) -> TierCost:
    """Time a tier with entries of several sizes, which are written, read in several ways and
    deleted again.

    Args:
        tier: The tier.
        sample: One token's KV, for the shape.
        rounds: Rounds of each timing.
        progress: Called as the timings proceed.
        cool: Called before each read, to empty caches so that the read is cold. Disk tiers do not
            need it.
        device: The model's device.

    Raises:
        StoreError: The tier does not store what is written to it, or has no room.
    """
    cases, table = dict[str, Callable[[], float]](), dict[str, tuple[int, int]]()
    n_layers = len(sample.layers)
    with _scratch(tier) as (timed_tier, make_cold):
        free = timed_tier.capacity - timed_tier.nbytes
        largest = min(
            MAX_ENTRY_TOKENS, max(1, MAX_ENTRY_NBYTES // sample.nbytes), free // (2 * sample.nbytes)
        )
        if largest < 1:
            raise StoreError(
                f"Tier {tier.name} has {free:,} bytes left, too few to time it. Delete entries or"
                " raise its capacity."
            )
        for n in [max(1, round(largest * share)) for share in ENTRY_SHARES]:
            kv = _random(sample, n)
            for count in (min(count, n_layers) or n_layers for count in LAYERS):
                name = f"tier {tier.name}, {n} tokens, {count} layers a read"
                cases[name] = partial(_timed, timed_tier, kv, count, cool or make_cold)
                table[name] = -(-n_layers // count), kv.nbytes
        next(iter(cases.values()))()  # to warm up
        seconds = _medians(cases, rounds, progress, TIER_BUDGET_S)
    read_s, byte_s = fitted(list(table.values()), seconds)
    return TierCost(read_s, byte_s, is_far(tier, device))


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

    For a disk tier it is a temporary tier in the same folder, where nothing is evicted and pages
    can be dropped.
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


def _random(sample: ChunkKV, n: int) -> ChunkKV:
    """Return random KV of `n` tokens of the sample's shape."""
    generator = torch.Generator().manual_seed(n)

    def like(part: Tensor) -> Tensor:
        return torch.randn((part.shape[0], n, part.shape[2]), generator=generator).to(part.dtype)

    return ChunkKV(tuple(LayerKV(like(layer.keys), like(layer.values)) for layer in sample.layers))


def _timed(tier: Tier, kv: ChunkKV, count: int, cool: Callable[[], object]) -> float:
    """Write an entry, read it `count` layers at a time (cold, if possible), and delete it in any
    case.
    """
    store, key = KVStore([tier]), ChunkKey(digest("measure"), secrets.token_hex(16))
    try:
        stored = store.put(key, kv, wait=True)
        cool()
        firsts = range(0, len(kv.layers), count)
        began = time.perf_counter()
        all_read = all(
            store.read_layers(key, at, min(count, len(kv.layers) - at)) is not None for at in firsts
        )
        seconds = time.perf_counter() - began
    finally:
        store.flush(EXIT_S)  # after Ctrl-C, the write at hand
        tier.delete([key])
    if not (stored and all_read):
        raise StoreError(
            f"Tier {tier.name} did not store {kv.nbytes:,} bytes: it may be full or down. See:"
            " ragfuse store ls"
        )
    return seconds
