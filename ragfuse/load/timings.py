"""Measure the `CostModel` of one model on this machine: full prefill, fused prefill, codecs, tiers.

Tokens and KV are random, because speed does not depend on the text. Every timing is the median of
interleaved rounds after a warm-up.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from ragfuse.codec import Codec, LayerMeta
from ragfuse.errors import ModelError, StoreError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.fuse.select import cost_of
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.load.layers import is_far
from ragfuse.load.stream import CPU
from ragfuse.plan.cost import Blend, CostModel, RowCost, TierCost
from ragfuse.process.jobs import EXIT_S
from ragfuse.store import DiskTier, KVStore, Tier
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.sizes import UNLIMITED

log = logging.getLogger("ragfuse.load")

MAX_TIMED_TOKENS = 3072
"""Length of the longest timed prompt in tokens, unless the model's context is shorter."""
LENGTH_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Lengths of timed full prefills, as shares of the longest timed prompt."""
PASS_BUDGET_S = 12.0
"""Seconds that a timed prefill may take. Prompts are shortened to meet this limit."""
TIMED_CHUNKS = 6
FUSED_LENGTH_SHARES, QUESTION_TOKENS = (1 / 8, 1 / 3, 1), (16, 96)
"""Lengths of timed fused prefills as shares of the longest timed prompt; tokens per question."""
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
"""(policy, ratio) of the timed fused prefills: several ratios for each policy except `none`."""
DECODED_TOKENS = 256
"""Number of tokens in the chunk whose decoding is timed, limited by the model's context length."""
MAX_ENTRY_NBYTES, MAX_ENTRY_TOKENS = 16 << 20, 1024
"""Limits on the largest entry written to a tier, in bytes and tokens. The smaller limit applies."""
ENTRY_SHARES, LAYERS = (1 / 16, 1 / 4, 1), (4, 1, 0)
"""Sizes of timed entries as shares of the largest, and layers per read; 0 means all layers."""
TIER_BUDGET_S = 15.0
"""Seconds after which no new round of a tier's timings is started."""
MIN_TIMED_S = 1e-9
"""Minimum timing in seconds. A coarse clock may measure 0, but timings are divisors."""
_NOTHING = 1e-50

Progress = Callable[[str, float], object]
"""A function that is called with the name of the current timing and the share done, 0 to 1."""
Cases = list[tuple[str, Callable[[], object]]]
"""A list of (description, function to time)."""


def measure(
    model: HFModel,
    tiers: Sequence[Tier],
    progress: Progress = lambda what, done: None,
    longest: int = MAX_TIMED_TOKENS,
    rounds: int = 3,
    cool: Callable[[], object] | None = None,
    codecs: Callable[[str], Codec | None] = lambda level: None,
) -> CostModel:
    """Time a model and tiers on this machine. Takes minutes at most.

    If a tier does not store the timed entries, a warning is logged and the tier is skipped.

    Args:
        model: The model.
        tiers: The tiers to time.
        progress: Called as the timings proceed.
        longest: Tokens of the longest prompt to time.
        rounds: Number of rounds after the warm-up.
        cool: Empties caches before each read of a tier. Not needed for disk tiers.
        codecs: Returns the codec of a level, or None. Decoding is timed for levels with a codec.

    Raises:
        ModelError: The model's KV cannot be reused, so there is nothing to time.
    """
    if model.profile.refusal:
        raise ModelError(
            f"{model.name} cannot reuse KV, so nothing is timed: {model.profile.refusal}"
        )

    def part(number: int) -> Progress:
        return lambda what, done: progress(what, (number + done) / (1 + len(tiers)))

    longest = min(longest, model.max_context or longest)
    short = _ids(model, max(1, longest // 8))
    for _ in range(2):  # the first is the warm-up
        short_s = _seconds(model, partial(model.full_prefill, short))
    longest = min(longest, max(len(short), round(len(short) * PASS_BUDGET_S / short_s)))
    lengths = sorted({max(1, round(longest * share)) for share in LENGTH_SHARES})
    prefills: Cases = [
        (f"full prefill, {n} tokens", partial(model.full_prefill, _ids(model, n))) for n in lengths
    ]
    fused, blends = _fused_prefills(model, longest)
    n_decoded, decoding, packed = _decoding(model, codecs)
    cases = [*prefills, *fused, *((f"decoding {level}", case) for level, case in decoding.items())]
    timed = iter(
        _medians([(name, partial(_seconds, model, case)) for name, case in cases], rounds, part(0))
    )
    prefill = tuple((n, next(timed)) for n in lengths)
    fused_s = fitted(
        [blend.features(model.n_layers) for blend in blends], [next(timed) for _ in blends]
    )
    decode = {level: next(timed) / n_decoded for level in decoding}
    costs, sample = dict[str, TierCost](), model.encode([0])
    for index, tier in enumerate(tiers):
        try:
            costs[tier.name] = tier_cost(tier, sample, rounds, part(1 + index), cool, model.device)
        except StoreError as error:
            log.warning("Tier %s could not be timed, so its speed is unknown: %s", tier.name, error)
    return CostModel(
        model=model.fingerprint,
        device=str(model.device),
        threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        n_layers=model.n_layers,
        prefill=RowCost(
            *fitted([(1, n, n * n) for n, _ in prefill], [seconds for _, seconds in prefill])
        ),
        fused=RowCost(*fused_s[:3]),
        placed_s=fused_s[3],
        tiers=costs,
        prefill_points=prefill,
        decode=decode,
        packed=packed,
    )


def fitted(table: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Fit each timing as a weighted sum of features, with non-negative weights.

    The sum of squared relative errors is minimised: least squares are solved for every subset of
    columns, and the best solution without negative weights is taken. If columns are proportional to
    each other, the first of them gets the whole weight. A column near zero gets the weight 0.

    Args:
        table: One row per timing, with one column per feature.
        seconds: The timings.

    Returns:
        One weight per column.
    """
    rows = np.array(table, float) / np.maximum(seconds, MIN_TIMED_S)[:, None]
    scale = np.abs(rows).max(0)
    rows, scale = np.where(scale > _NOTHING, rows, 0.0), np.maximum(scale, _NOTHING)
    n = rows.shape[1]
    best, weights = float(len(rows)), np.zeros(n)
    for chosen in (list(each) for size in range(1, n + 1) for each in combinations(range(n), size)):
        columns = rows[:, chosen] / scale[chosen]
        found = np.linalg.lstsq(columns, np.ones(len(rows)))[0]
        error = float(np.square(columns @ found - 1).sum())
        if (found >= 0).all() and error < best * (1 - 1e-9):
            best, weights = error, np.zeros(n)
            weights[chosen] = found / scale[chosen]
    return tuple(map(float, weights))


def _medians(
    cases: Sequence[tuple[str, Callable[[], float]]],
    rounds: int,
    progress: Progress,
    budget_s: float = inf,
) -> list[float]:
    """Return each case's median seconds over interleaved rounds; the first round is a warm-up."""
    timings, began = [list[float]() for _ in cases], time.perf_counter()
    for number in range(rounds + 1):
        if number > 1 and time.perf_counter() - began > budget_s:
            break
        for index, (name, case) in enumerate(cases):
            progress(name, (number + index / len(cases)) / (rounds + 1))
            timings[index].append(case())
    return [median(each[1:]) for each in timings]


# the model


def _fused_prefills(model: HFModel, longest: int) -> tuple[Cases, list[Blend]]:
    """Return functions for fused prefills over KV in host memory, and the row counts of each."""
    cases, blends = Cases(), list[Blend]()
    for share in FUSED_LENGTH_SHARES:
        tokens = max(TIMED_CHUNKS + 2, round(longest * share))
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
            cases.append((f"fused prefill, {policy} {ratio:.0%}, {tokens} tokens", case))
            cost, chunks = cost_of(policy), [size] * (TIMED_CHUNKS - 1)
            forced = tokens - TIMED_CHUNKS * size
            blends.append(Blend(cost, tokens, forced, sum(chunks), cost.share_of(ratio, chunks)))
    return cases, blends


def _decoding(
    model: HFModel, codecs: Callable[[str], Codec | None]
) -> tuple[int, dict[str, Callable[[], object]], dict[str, float]]:
    """Encode a chunk of random tokens. Return the number of tokens and two dicts by codec level: a
    function that decodes the chunk, and the encoded bytes as a share of the raw bytes.
    """
    kv = _in_host_memory(
        model, _ids(model, min(DECODED_TOKENS, model.max_context or DECODED_TOKENS))
    )
    cases, packed = dict[str, Callable[[], object]](), dict[str, float]()
    for level in LEVEL_NAMES[1:]:
        if (codec := codecs(level)) is None:
            continue
        try:
            blobs = [codec.encode(layer, at) for at, layer in enumerate(kv.layers)]
        except ValueError:  # only the raw codec can store this KV
            continue
        metas = [LayerMeta.of(layer, blob) for layer, blob in zip(kv.layers, blobs, strict=True)]
        cases[level] = partial(_decode, codec, blobs, metas)
        packed[level] = sum(blob.numel() for blob in blobs) / kv.nbytes
    return kv.n_tokens, cases, packed


def _in_host_memory(model: HFModel, ids: list[int]) -> ChunkKV:
    layers = model.encode(ids).layers
    return ChunkKV(
        tuple(LayerKV(kv.keys.cpu().contiguous(), kv.values.cpu().contiguous()) for kv in layers)
    )


def _ids(model: HFModel, count: int) -> list[int]:
    """Return `count` random token ids, from a fixed seed."""
    vocabulary, generator = (
        model.model.config.get_text_config().vocab_size,
        torch.Generator().manual_seed(0),
    )
    return [int(token) for token in torch.randint(vocabulary, (count,), generator=generator)]


def _decode(codec: Codec, blobs: list[Tensor], metas: list[LayerMeta]) -> None:
    for blob, meta in zip(blobs, metas, strict=True):
        codec.decode(blob, meta)


def _seconds(model: HFModel, case: Callable[[], object]) -> float:
    """Return the seconds of one call of `case`, including GPU work started by the call."""

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
    """Time reads of a tier, with several sizes of entries and several numbers of layers per read.

    Args:
        tier: The tier.
        sample: The KV of one token, which gives the shapes and dtypes of the entries.
        rounds: Number of rounds after the warm-up.
        progress: Called as the timings proceed.
        cool: Empties caches before each read. Not needed for disk tiers.
        device: The model's device.

    Raises:
        StoreError: The tier did not store an entry that was written to it.
    """
    cases, table = list[tuple[str, Callable[[], float]]](), list[tuple[int, int]]()
    n_layers = len(sample.layers)
    with _scratch(tier) as (timed_tier, make_cold):
        free = timed_tier.capacity - timed_tier.nbytes
        room = min(MAX_ENTRY_NBYTES, free // 2)  # so that nothing is evicted
        largest = max(1, min(MAX_ENTRY_TOKENS, room // sample.nbytes))
        for n in [max(1, round(largest * share)) for share in ENTRY_SHARES]:
            kv = _random(sample, n)
            for count in (min(count, n_layers) or n_layers for count in LAYERS):
                name = f"tier {tier.name}, {n} tokens, {count} layers a read"
                cases.append((name, partial(_timed, timed_tier, kv, count, cool or make_cold)))
                table.append((-(-n_layers // count), kv.nbytes))
        seconds = _medians(cases, rounds, progress, TIER_BUDGET_S)
    read_s, byte_s = fitted(table, seconds)
    return TierCost(read_s, byte_s, is_far(tier, device))


def forget_pages(folder: Path) -> None:
    """Drop the files of all entries below `folder` from the page cache, if the system can do that.

    Files are synced first, because dirty pages cannot be dropped.
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
    """Yield the tier to time (for a disk, a temporary tier) and a function that empties caches."""
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
    generator = torch.Generator().manual_seed(n)

    def like(part: Tensor) -> Tensor:
        return torch.randn((part.shape[0], n, part.shape[2]), generator=generator).to(part.dtype)

    return ChunkKV(tuple(LayerKV(like(layer.keys), like(layer.values)) for layer in sample.layers))


def _timed(tier: Tier, kv: ChunkKV, count: int, cool: Callable[[], object]) -> float:
    """Write, read and delete an entry; return the seconds of reading `count` layers at a time."""
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
        store.flush(EXIT_S)  # after Ctrl-C, finishes the current write
        tier.delete([key])
    if not (stored and all_read):
        raise StoreError(
            f"Tier {tier.name} did not store {kv.nbytes:,} bytes. Check its capacity and"
            " connection."
        )
    return seconds
