"""`ragfuse calibrate`: decide whether blending is safe for a model on some documents, and choose
policy and ratio.

Questions are generated from the documents. At each token of the answer by full prefill, calibration
compares the next-token distributions of fused prefill and full prefill. No known answers are
needed, so any model and any documents work.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from ragfuse.calibration.case import Case
from ragfuse.calibration.comparison import Row, ask, prefill_speedup
from ragfuse.calibration.methods import Lab, Method
from ragfuse.calibration.runner import Stopwatch, circumstances
from ragfuse.calibration.stats import mean_interval, ratio_interval
from ragfuse.errors import InputError, ModelError, SettingsError
from ragfuse.hf.model import HFModel
from ragfuse.telemetry.progress import progress
from ragfuse.types.keys import digest

Chunk = tuple[str, str]
"""The text and the source (document name) of a chunk."""
REUSE = Method("none", 0.0, "alone")
LADDER = (
    Method("none", 0.0, "filler"),
    Method("lego", 0.06),
    *(Method("lexical", ratio) for ratio in (0.05, 0.10, 0.20)),
    *(Method("hkvd", ratio) for ratio in (0.15, 0.30)),
    *(Method("query", ratio) for ratio in (0.05, 0.10, 0.20, 0.30)),
)
"""The policies and ratios to measure. Chunks are encoded after filler text, as in the engine."""

MAX_KL_OVER_REUSE = 0.25
"""A choice is safe only if the 95% interval of KL / (KL of plain reuse) ends at or below this."""
MIN_AGREEMENT = 0.9
"""Minimum share of answer tokens on which a safe choice and full prefill agree."""
PROMPT_PASSAGES = 6
MIN_PASSAGE_CHARS = 80
"""Minimum characters of a chunk. Shorter chunks are left out of prompts and questions."""
POOL_PASSAGES = 24
"""Number of chunks to draw prompts from. With 20 questions, each chunk is in about 5 prompts."""
MIN_QUESTIONS = 8
"""Number of questions on which every choice is measured before any choice is dropped."""


@dataclass(frozen=True)
class ChoiceResult:
    """The measurements of one policy and ratio.

    Args:
        policy: The selection policy.
        ratio: The recompute ratio.
        kl_over_reuse: KL to full prefill, divided by the KL of plain reuse to full prefill.
        low: Lower end of the 95% interval of `kl_over_reuse`.
        high: Upper end of the 95% interval of `kl_over_reuse`.
        kl: KL to full prefill, in nats per token.
        top1: Top-1 agreement: share of answer tokens with the same argmax as full prefill.
        ttft_x: TTFT speedup over full prefill.
        questions: Number of measured questions.
    """

    policy: str
    ratio: float
    kl_over_reuse: float
    low: float
    high: float
    kl: float
    top1: float
    ttft_x: float
    questions: int = 0

    @property
    def outcome(self) -> str:
        """The verdict: "safe", or a reason ("too far", "top-1 too low" or "not certain")."""
        if self.kl_over_reuse > MAX_KL_OVER_REUSE:
            return "too far"
        if self.top1 < MIN_AGREEMENT:
            return "top-1 too low"
        return "safe" if self.high <= MAX_KL_OVER_REUSE else "not certain"


def make_cases(chunks: Sequence[Chunk], wanted: int) -> list[Case]:
    """Generate questions. Each has six chunks, and asks about a name or rare word in one chunk.

    `passages_with` chooses the other five chunks from a pool. The pool has up to `POOL_PASSAGES`
    chunks, or up to `wanted` chunks if `wanted` is larger. If the pool has at least `wanted`
    chunks, no two questions ask about the same chunk.

    Args:
        chunks: The chunks of all documents.
        wanted: Number of questions.

    Raises:
        InputError: There are too few chunks.
    """
    chunks = [chunk for chunk in chunks if len(chunk[0]) >= MIN_PASSAGE_CHARS]
    if len(chunks) <= PROMPT_PASSAGES:
        raise InputError(
            f"Calibration needs at least {PROMPT_PASSAGES + 1} chunks, but found {len(chunks)}."
            " Give more documents, or make smaller chunks with RAGFUSE_CHUNK_TOKENS."
        )
    generator = random.Random(0)
    seen = word_counts(chunks)
    pool = _pool(chunks, max(POOL_PASSAGES, wanted), generator)
    asked = generator.sample(pool, len(pool))
    cases = []
    for index in range(wanted):
        about = asked[index % len(asked)]
        texts = tuple(text for text, _ in passages_with(about, pool, PROMPT_PASSAGES, generator))
        question = f"What is said about {topics(about[0], seen)[0]}?"
        cases.append(Case("calibrate", f"0.{index}", question, ("",), texts))
    return cases


def passages_with(
    about: Chunk, pool: Sequence[Chunk], count: int, generator: random.Random
) -> list[Chunk]:
    """Return `about` and `count - 1` other chunks of `pool`, in random order. At least `count // 2`
    of the others are from the document of `about`, if `pool` has enough chunks of that document.
    """
    others = [each for each in dict.fromkeys(pool) if each != about]
    generator.shuffle(others)
    mates = [each for each in others if each[1] == about[1]][: count // 2]
    rest = [each for each in others if each not in mates]
    chosen = [about, *mates, *rest][:count]
    generator.shuffle(chosen)
    return chosen


def _pool(chunks: Sequence[Chunk], size: int, generator: random.Random) -> list[Chunk]:
    """Return up to `size` random chunks. The documents take turns, with six chunks per turn."""
    by_document: dict[str, list[Chunk]] = {}
    for chunk in generator.sample(chunks, len(chunks)):
        by_document.setdefault(chunk[1], []).append(chunk)
    pool, left = list[Chunk](), [*by_document.values()]
    while left and len(pool) < size:
        document = left.pop(0)
        pool += document[:PROMPT_PASSAGES]
        left += [document[PROMPT_PASSAGES:]] if len(document) > PROMPT_PASSAGES else []
    return pool[:size]


def words_of(text: str) -> list[str]:
    """Return the words of a text with at least three letters, in order."""
    return re.findall(r"[^\W\d_][\w'-]{2,}", text)


def word_counts(chunks: Sequence[Chunk]) -> Mapping[str, int]:
    """Return the number of chunks that contain each word."""
    return Counter(word for text, _ in chunks for word in set(words_of(text)))


def topics(text: str, seen: Mapping[str, int]) -> list[str]:
    """Return the names in a text, or the long words if the text has no names. Names and words in
    the fewest chunks come first (`seen`: number of chunks by word).
    """
    names = re.findall(r"(?<=[a-z,] )[A-Z][\w'-]+(?: [A-Z][\w'-]+)*", text)
    found = names or [word for word in words_of(text) if len(word) > 6] or text.split()[:3]
    return sorted(dict.fromkeys(found), key=lambda each: (seen.get(each.split()[0], 0), -len(each)))


def calibrate(
    model: HFModel,
    cases: Sequence[Case],
    console: Console,
    name: str,
    verified: bool = True,
) -> dict[str, Any]:
    """Measure all policies and ratios of `LADDER`, and choose a safe policy and ratio.

    Args:
        model: The model.
        cases: The questions.
        console: Console for progress.
        name: Name of the model, for messages.
        verified: True if the model passed `ragfuse verify`. If False, no choice is safe.

    Returns:
        A report in JSON types, with safe, policy, ratio, kl_over_reuse, seconds, tried and advice.

    Raises:
        ModelError: The model cannot reuse the KV of chunks.
        SettingsError: `filler_tokens` is 0.
    """
    began = time.perf_counter()
    lab = Lab(model)
    stopwatch = Stopwatch(model.device)
    if model.profile.refusal:
        raise ModelError(
            f"{name} cannot reuse the KV of chunks, so there is nothing to calibrate:"
            f" {model.profile.refusal}"
        )
    if not lab.engine("filler").runtime.encoder.filler_tokens:
        raise SettingsError(
            "Calibration needs filler text, but filler_tokens is 0. Unset RAGFUSE_FILLER_TOKENS or"
            " filler_tokens in ragfuse.toml. Without filler, the policy is hkvd at ratio 0.15."
        )
    rows, kept = list[Row](), list(LADDER)
    try:
        with progress(console) as bar:
            task = bar.add_task("questions", total=len(cases))
            # first calls are slower, so the measurements of this round are not used
            list(ask(lab, stopwatch, cases[0], (REUSE, *LADDER), answers=False))
            for index, case in enumerate(cases):
                rows += ask(lab, stopwatch, case, (REUSE, *kept), answers=False)
                if index + 1 >= MIN_QUESTIONS:
                    kept = [method for method in kept if not is_hopeless(rows, method)]
                bar.update(task, advance=1, description=f"questions, {len(kept)} choices")
                if not kept:
                    break
    finally:
        lab.close()
    tried = curve(rows)
    best = choose(tried) if verified else None
    return {
        "safe": best is not None,
        "policy": best.policy if best else "full",
        "ratio": best.ratio if best else 1.0,
        "kl_over_reuse": best.kl_over_reuse if best else min(each.kl_over_reuse for each in tried),
        "seconds": time.perf_counter() - began,
        "questions": len({row.case for row in rows}),
        "tokens": mean(row.tokens for row in rows),
        "verified": verified,
        "tried": [vars(each) | {"outcome": each.outcome} for each in tried],
        "advice": advice(name, best, tried, verified),
        "model": name,
        "documents": digest(*(chunk for case in cases for chunk in case.chunks)),
        **circumstances(model.device, torch.get_num_threads()),
    }


def curve(rows: Sequence[Row], methods: Sequence[Method] = LADDER) -> list[ChoiceResult]:
    """Return the measurements of each method, relative to plain reuse on the same questions."""
    reuse = {row.case: row.kl or 0.0 for row in rows if row.method == REUSE.name}
    return [_result([row for row in rows if _is_of(row, method)], reuse) for method in methods]


def _is_of(row: Row, method: Method) -> bool:
    return (row.method, row.ratio) == (method.name, method.ratio)


def _result(rows: Sequence[Row], reuse: Mapping[str, float]) -> ChoiceResult:
    """Return the measurements of one method from `rows`. `reuse`: KL of plain reuse by question."""
    ours = [row.kl or 0.0 for row in rows]
    theirs = [reuse[row.case] for row in rows]
    low, high = ratio_interval(ours, theirs)
    return ChoiceResult(
        policy=rows[0].method.partition("@")[0],
        ratio=rows[0].ratio or 0,
        kl_over_reuse=sum(ours) / max(sum(theirs), 1e-12),
        low=low,
        high=high,
        kl=mean(ours),
        top1=mean(row.top1 or 0.0 for row in rows),
        ttft_x=prefill_speedup(rows),
        questions=len(rows),
    )


def is_hopeless(rows: Sequence[Row], method: Method) -> bool:
    """Return True if the whole 95% interval of a method's KL or agreement is unsafe."""
    agreement = [row.top1 or 0.0 for row in rows if _is_of(row, method)]
    (result,) = curve(rows, [method])
    return result.low > MAX_KL_OVER_REUSE or mean_interval(agreement)[1] < MIN_AGREEMENT


def choose(tried: Sequence[ChoiceResult]) -> ChoiceResult | None:
    """Return the fastest safe choice with a KL near the lowest, or None if no choice is safe."""
    safe = [each for each in tried if each.outcome == "safe"]
    if not safe:
        return None
    best = min(each.kl_over_reuse for each in safe)
    return max(
        (each for each in safe if each.kl_over_reuse <= 1.25 * best + 0.02),
        key=lambda each: each.ttft_x,
    )


def advice(
    name: str, best: ChoiceResult | None, tried: Sequence[ChoiceResult], verified: bool = True
) -> str:
    """Return the recommendation that follows from a calibration, as text for users."""
    if not verified:
        return f"Do not reuse chunks with {name}: `ragfuse verify` failed."
    if best is None:
        closest = min(tried, key=lambda each: each.kl_over_reuse)
        return (
            f"Do not reuse chunks with {name}: the closest setting, {closest.policy} at"
            f" {closest.ratio:.0%}, has KL to full prefill of up to {closest.high:.2f} times plain"
            f" reuse's, and {closest.top1:.1%} top-1 agreement. Prompts use full prefill. With"
            ' more --questions, a setting with outcome "not certain" may prove safe.'
        )
    return (
        f"Use {best.policy} at {best.ratio:.0%} with {name}: TTFT is {best.ttft_x:.1f}x faster, and"
        f" KL to full prefill is {best.kl_over_reuse:.2f} times plain reuse's."
    )


def draw_calibration(result: Mapping[str, Any], path: Any) -> None:
    """Draw the KL of each choice against the TTFT speedup. A ring marks the chosen policy."""
    from ragfuse.calibration.plots import model_in_title, saved

    with saved(path, (7.5, 5)) as figure:
        axes = figure.add_subplot()
        for policy in dict.fromkeys(each["policy"] for each in result["tried"]):
            mine = [each for each in result["tried"] if each["policy"] == policy]
            x, y, low, high = (
                [each[name] for each in mine] for name in ("ttft_x", "kl_over_reuse", "low", "high")
            )
            (line,) = axes.plot(x, y, "o-", label=policy)
            axes.vlines(x, low, high, color=line.get_color(), alpha=0.35)
            for each, *at in zip(mine, x, y, strict=True):
                share = f"{each['ratio']:.0%}"
                axes.annotate(share, at, (5, 3), textcoords="offset points", fontsize=7)
                if (policy, each["ratio"]) == (result["policy"], result["ratio"]):
                    axes.plot(*at, "ko", markerfacecolor="none", markersize=14, label="taken")
        bound = f"safe: below this line, with at least {MIN_AGREEMENT:.0%} top-1 agreement"
        axes.axhline(MAX_KL_OVER_REUSE, color="black", linewidth=0.8, linestyle="--", label=bound)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("TTFT, times faster than full prefill")
        axes.set_ylabel("KL to full prefill (plain reuse = 1), 95% interval")
        title = f"{model_in_title(result['model'])}, {result['questions']} questions"
        axes.set_title(f"{title} (lower right is better)", fontsize=11)
        axes.grid(True, alpha=0.3)
        figure.legend(fontsize=8, loc="outside lower center", ncols=2)
