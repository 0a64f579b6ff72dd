"""Time full and fused prefills and the decoding of codecs with random tokens: speed does not depend on the text."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ragfuse.codec import Codec, LayerMeta
from ragfuse.fuse.fusor import CachedRun
from ragfuse.fuse.select import cost_of
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.measure.medians import Progress, medians
from ragfuse.plan.estimate import Blend
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.levels import LEVEL_NAMES

LENGTH_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Lengths at which full prefill is timed, as shares of the longest."""
PASS_BUDGET_S, MIN_LENGTHS = 12.0, 4
"""After a prefill of more than PASS_BUDGET_S seconds no longer prompt is timed, once there are MIN_LENGTHS lengths."""
TIMED_CHUNKS = 6
FUSED_LENGTH_SHARES, QUESTION_TOKENS = (1 / 8, 1 / 3, 1), (16, 96)
"""Lengths at which fused prefills are timed, as shares of the longest; and the tokens of their questions, in turn."""
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


def prefill_points(model: HFModel, max_tokens: int, rounds: int, progress: Progress) -> tuple[tuple[int, float], ...]:
    """Time full prefills of up to `max_tokens` tokens; return (tokens, median seconds), shortest first."""
    ids, cases, lengths = _ids(model, max_tokens), dict[str, Callable[[], float]](), list[int]()
    for length in sorted({max(1, round(max_tokens * share)) for share in LENGTH_SHARES}):
        case = partial(_seconds, model, partial(model.full_prefill, ids[:length]))
        cases[f"full prefill, {length} tokens"] = case
        lengths.append(length)
        if case() > PASS_BUDGET_S and len(cases) >= MIN_LENGTHS:  # to warm up
            break
    return tuple(zip(lengths, medians(cases, rounds, progress).values(), strict=True))


def fused_points(model: HFModel, max_tokens: int, rounds: int, progress: Progress) -> list[tuple[Blend, float]]:
    """Time fused prefills of each policy, length and ratio, with KV in host memory (so a GPU's includes the copy).

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
            runs = [CachedRun(at, at * size, (at + 1) * size, at * size, blend=at > 0) for at in range(TIMED_CHUNKS)]
            source = KVSource([_in_host_memory(model, ids[:size])] * TIMED_CHUNKS)
            case = partial(model.fuse, ids, positions, runs, source, policy, ratio)
            share_computed = min(1.0, case().mean_ratio)  # to warm up
            cases[f"fused prefill, {policy} {ratio:.0%}, {tokens} tokens"] = partial(_seconds, model, case)
            forced, candidates = tokens - TIMED_CHUNKS * size, (TIMED_CHUNKS - 1) * size
            blends.append(Blend(cost_of(policy), tokens, forced, candidates, share_computed))
    return list(zip(blends, medians(cases, rounds, progress).values(), strict=True))


def decoding(
    model: HFModel, codecs: Callable[[str], Codec | None], rounds: int, progress: Progress
) -> tuple[dict[str, float], dict[str, float]]:
    """Time the decoding of each level on this thread and from host memory, which is how entries are decoded.

    Args:
        model: The model whose KV is encoded.
        codecs: Returns the codec of a level, or None.
        rounds: Rounds of each timing, after one to warm up.
        progress: Called as the timings proceed.

    Returns:
        By level, median seconds to decode one token's KV; and by level, encoded bytes over raw bytes. Levels without a
        codec, or that cannot encode this model's KV, are left out.
    """
    kv = _in_host_memory(model, _ids(model, min(DECODED_TOKENS, model.max_context or DECODED_TOKENS)))
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
    found = medians(cases, rounds, lambda level, done: progress(f"decoding {level}", done))
    return {level: seconds / kv.n_tokens for level, seconds in found.items()}, packed


def _in_host_memory(model: HFModel, ids: list[int]) -> ChunkKV:
    """Return the KV of a text as a memory tier returns it, whatever device it was computed on."""
    layers = model.encode(ids).layers
    return ChunkKV(tuple(LayerKV(kv.keys.cpu().contiguous(), kv.values.cpu().contiguous()) for kv in layers))


def _ids(model: HFModel, count: int) -> list[int]:
    """Return random token ids, the same in every run."""
    vocabulary, generator = model.model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    return [int(token) for token in torch.randint(vocabulary, (count,), generator=generator)]


def _decode(codec: Codec, blobs: list[Tensor], metas: list[LayerMeta]) -> None:
    for blob, meta in zip(blobs, metas, strict=True):
        codec.decode(blob, meta)


def _seconds(model: HFModel, case: Callable[[], object]) -> float:
    """Return the seconds of one run, including the work that it started on a GPU."""
    _synchronize(model)
    began = time.perf_counter()
    case()
    _synchronize(model)
    return time.perf_counter() - began


def _synchronize(model: HFModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
