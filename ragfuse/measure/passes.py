"""Times full and fused prefills of random tokens: speed does not depend on words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from ragfuse.fuse.fusor import Run
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.profiles import FusedPoint

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Lengths that full prefill is timed at, of the longest."""
ENOUGH_S, LEAST = 12.0, 4
"""Longer prompts are left out once one takes so long, but not of the first few."""
CHUNKS = 6
SIZES, QUESTIONS = (1 / 8, 1 / 3, 1), (16, 96)
"""Prompts that fused prefills are timed with, of the longest, and tokens of their questions in turn."""
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
"""Policies of each kind, with ratios."""

Progress = Callable[[str, float], object]


def prefill_points(model: HFModel, top: int, rounds: int, progress: Progress) -> tuple[tuple[int, float], ...]:
    """(tokens, seconds) of full prefills of up to `top` tokens, shortest first."""
    lengths = sorted({max(1, round(top * share)) for share in SHARES})
    ids, cases = _ids(model, top), dict[str, Callable[[], object]]()
    for length in lengths:  # the warm-up, which tells what would take too long
        case = _prefill(model, ids[:length])
        cases[str(length)] = case
        if _seconds(model, case) > ENOUGH_S and len(cases) >= LEAST:
            break
    found = _medians(model, cases, rounds, lambda name, done: progress(f"full prefill, {name} tokens", done))
    return tuple((int(name), seconds) for name, seconds in found.items())


def fused_points(model: HFModel, top: int, rounds: int, progress: Progress) -> tuple[FusedPoint, ...]:
    """Fused prefills of each kind, size and ratio, their KV at hand."""
    cases, points = dict[str, Callable[[], object]](), list[FusedPoint]()
    for share in SIZES:
        for number, (policy, ratio) in enumerate(BLENDS):
            tokens = max(CHUNKS + 2, round(top * share))
            question = max(1, min(QUESTIONS[number % len(QUESTIONS)], tokens // 4))
            case, point = _fused(model, tokens, question, policy, ratio)
            cases[f"{policy} {ratio:.0%}, {tokens} tokens"] = case
            points.append(point)
    found = _medians(model, cases, rounds, lambda name, done: progress(f"fused prefill, {name}", done))
    return tuple(
        FusedPoint(p.policy, p.tokens, p.forced, p.offered, p.ratio, seconds)
        for p, seconds in zip(points, found.values(), strict=True)
    )


def _ids(model: HFModel, count: int) -> list[int]:
    """Random ids, always the same ones."""
    vocabulary, drawn = model.model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    return [int(token) for token in torch.randint(vocabulary, (count,), generator=drawn)]


def _prefill(model: HFModel, ids: Sequence[int]) -> Callable[[], object]:
    return lambda: model.full_prefill(ids)


def _fused(
    model: HFModel, tokens: int, question: int, policy: str, ratio: float
) -> tuple[Callable[[], object], FusedPoint]:
    """One fused prefill, run once now to warm up, and what it computes; its first chunk is exact, as in a real one."""
    size = (tokens - question) // CHUNKS
    ids, positions = _ids(model, tokens), torch.arange(tokens)
    source = KVSource([model.encode(ids[:size])] * CHUNKS)
    runs = [Run(at, at * size, (at + 1) * size, at * size, blend=at > 0) for at in range(CHUNKS)]

    def case() -> float:
        return model.fuse(ids, positions, runs, source, policy, ratio).mean_ratio

    return case, FusedPoint(policy, tokens, tokens - CHUNKS * size, (CHUNKS - 1) * size, min(1.0, case()), 0.0)


def _medians(
    model: HFModel, cases: Mapping[str, Callable[[], object]], rounds: int, progress: Progress
) -> dict[str, float]:
    """Median seconds of each case, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds):
        for index, (name, case) in enumerate(cases.items()):
            progress(name, (turn + index / len(cases)) / rounds)
            taken[name].append(_seconds(model, case))
    return {name: median(seconds) for name, seconds in taken.items()}


def _seconds(model: HFModel, case: Callable[[], object]) -> float:
    """One run, with all that it started on an accelerator."""
    _synchronize(model)
    began = time.perf_counter()
    case()
    _synchronize(model)
    return time.perf_counter() - began


def _synchronize(model: HFModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
