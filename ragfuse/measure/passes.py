"""Time full and fused prefills of random tokens, as the speed does not depend on the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from ragfuse.fuse.fusor import CachedRun, LayerSource
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.measure.read_cost import held_up_s
from ragfuse.store import KVStore, MemoryTier
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV
from ragfuse.types.profiles import FusedPoint
from ragfuse.types.sizes import UNLIMITED

LENGTH_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Lengths at which full prefill is timed, as shares of the longest."""
PASS_BUDGET_S, MIN_LENGTHS = 12.0, 4
"""After a prefill of more than PASS_BUDGET_S seconds no longer prompt is timed, once there are MIN_LENGTHS lengths."""
TIMED_CHUNKS = 6
FUSED_LENGTH_SHARES, QUESTION_TOKENS = (1 / 8, 1 / 3, 1), (16, 96)
"""Lengths at which fused prefills are timed, as shares of the longest; and the tokens of their questions, in turn."""
HELD_UP = 96, 4
"""For `reading_s`: tokens of the prompt, and by how much the number of rounds is multiplied."""
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

Progress = Callable[[str, float], object]


def prefill_points(model: HFModel, max_tokens: int, rounds: int, progress: Progress) -> tuple[tuple[int, float], ...]:
    """Time full prefills of up to `top` tokens; return (tokens, median seconds), shortest first."""
    lengths = sorted({max(1, round(max_tokens * share)) for share in LENGTH_SHARES})
    ids, cases = _ids(model, max_tokens), dict[str, Callable[[], object]]()
    for length in lengths:  # the warm-up, which also shows which lengths would take too long
        case = _prefill(model, ids[:length])
        cases[str(length)] = case
        if _seconds(model, case) > PASS_BUDGET_S and len(cases) >= MIN_LENGTHS:
            break
    found = _medians(model, cases, rounds, lambda name, done: progress(f"full prefill, {name} tokens", done))
    return tuple((int(name), seconds) for name, seconds in found.items())


def fused_points(model: HFModel, max_tokens: int, rounds: int, progress: Progress) -> tuple[FusedPoint, ...]:
    """Time fused prefills of each policy, length and ratio, with KV in host memory (so a GPU's includes the copy)."""
    cases, points = dict[str, Callable[[], object]](), list[FusedPoint]()
    for share in FUSED_LENGTH_SHARES:
        for number, (policy, ratio) in enumerate(BLENDS):
            tokens = max(TIMED_CHUNKS + 2, round(max_tokens * share))
            question = max(1, min(QUESTION_TOKENS[number % len(QUESTION_TOKENS)], tokens // 4))
            case, point = _fused(model, tokens, question, policy, ratio)
            cases[f"{policy} {ratio:.0%}, {tokens} tokens"] = case
            points.append(point)
    found = _medians(model, cases, rounds, lambda name, done: progress(f"fused prefill, {name}", done))
    return tuple(
        FusedPoint(p.policy, p.tokens, p.forced, p.candidate_rows, p.ratio, seconds)
        for p, seconds in zip(points, found.values(), strict=True)
    )


def reading_s(model: HFModel, max_tokens: int, rounds: int, folder: Path | None, progress: Progress) -> float:
    """Return the seconds by which each read on a background thread delays the model; see `read_cost.py`."""
    progress("reading while fusing", 0.0)
    tokens, round_factor = min(HELD_UP[0], max_tokens), HELD_UP[1]
    ids, runs, chunk = _prompt(model, max(TIMED_CHUNKS + 2, tokens), 1)
    positions = torch.arange(len(ids))

    def fuse(source: LayerSource) -> float:
        return _seconds(model, lambda: model.fuse(ids, positions, runs, source, "none", 0.0))

    return held_up_s(fuse, KVSource([chunk] * TIMED_CHUNKS), [chunk] * TIMED_CHUNKS, folder, round_factor * rounds)


def at_hand(kv: ChunkKV) -> ChunkKV:
    """Return KV as a memory tier returns it: in host memory, whatever device it was computed on."""
    store, key = KVStore([MemoryTier(UNLIMITED, lambda entries: ())]), ChunkKey(digest("measure"), digest("at hand"))
    store.put(key, kv)
    layers = store.read_layers(key, 0, len(kv.layers))
    return ChunkKV(layers) if layers is not None else kv


def _prompt(model: HFModel, tokens: int, question: int) -> tuple[list[int], list[CachedRun], ChunkKV]:
    """Return a prompt's token ids, its chunks (the first is a prefix, so its KV is exact), and the KV of a chunk."""
    size, ids = (tokens - question) // TIMED_CHUNKS, _ids(model, tokens)
    runs = [CachedRun(at, at * size, (at + 1) * size, at * size, blend=at > 0) for at in range(TIMED_CHUNKS)]
    return ids, runs, at_hand(model.encode(ids[:size]))


def _ids(model: HFModel, count: int) -> list[int]:
    """Return random token ids, the same in every run."""
    vocabulary, generator = model.model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    return [int(token) for token in torch.randint(vocabulary, (count,), generator=generator)]


def _prefill(model: HFModel, ids: Sequence[int]) -> Callable[[], object]:
    return lambda: model.full_prefill(ids)


def _fused(
    model: HFModel, tokens: int, question: int, policy: str, ratio: float
) -> tuple[Callable[[], object], FusedPoint]:
    """Return a fused prefill to be timed, run once to warm up, and a description of what it computes."""
    (ids, runs, chunk), positions = _prompt(model, tokens, question), torch.arange(tokens)
    source, size = KVSource([chunk] * TIMED_CHUNKS), chunk.n_tokens

    def case() -> float:
        return model.fuse(ids, positions, runs, source, policy, ratio).mean_ratio

    return case, FusedPoint(
        policy, tokens, tokens - TIMED_CHUNKS * size, (TIMED_CHUNKS - 1) * size, min(1.0, case()), 0.0
    )


def _medians(
    model: HFModel, cases: Mapping[str, Callable[[], object]], rounds: int, progress: Progress
) -> dict[str, float]:
    """Return the median seconds of each case; each round runs all cases once."""
    timings: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(rounds):
        for index, (name, case) in enumerate(cases.items()):
            progress(name, (round_index + index / len(cases)) / rounds)
            timings[name].append(_seconds(model, case))
    return {name: median(seconds) for name, seconds in timings.items()}


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
