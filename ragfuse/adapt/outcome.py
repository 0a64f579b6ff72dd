"""What came of an adapter: fused answers with it beside full prefill, on held-out documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from ragfuse.adapt.checkpoint import Evaluation
from ragfuse.calibration.case import Case
from ragfuse.calibration.comparison import FULL
from ragfuse.calibration.methods import Lab, Method
from ragfuse.calibration.metrics import f1
from ragfuse.calibration.plots import saved
from ragfuse.calibration.prompts import NEW_TOKENS
from ragfuse.engine.options import ends_of
from ragfuse.hf.rounding_error import kl
from ragfuse.telemetry.progress import progress


@dataclass(frozen=True)
class AdaptOutcome:
    """What is left between fused answers and full prefill with an adapter, on questions about held-out documents.

    Args:
        questions: Number of questions.
        kl: KL of fused prompts to full prefill, in nats per token of full prefill's answers.
        f1: F1 of the fused answers, with full prefill's as the right ones.
    """

    questions: int
    kl: float
    f1: float


def compare(lab: Lab, cases: Sequence[Case], method: Method, console: Console) -> AdaptOutcome:
    """Compare the answers of a method with those of full prefill.

    Args:
        lab: A lab of the model with the adapter.
        cases: The questions.
        method: How prompts are fused.
        console: Where progress is shown.
    """
    model, ends, scores, distances = lab.model, ends_of(lab.model), list[float](), list[float]()
    with progress(console) as bar:
        for case in bar.track(cases, description="comparing"):
            lab.hold(case, [method])
            prompt, count = lab.prompt(case), NEW_TOKENS[case.task]
            full, fused = (lab.prefill(each, prompt) for each in (FULL, method))
            wanted = lab.write(full.copy(), count)
            answer = model.text(lab.write(fused.copy(), count))
            scores.append(f1(answer, (model.text(wanted),)))
            forced = (*wanted, *(ends[:1] or (0,)))[:count]
            logits = [model.score_continuation(each, forced) for each in (full, fused)]
            distances.append(max(0.0, kl(*logits)))
    return AdaptOutcome(len(cases), mean(distances), mean(scores))


def method_of(calibrated: Mapping[str, Any]) -> Method:
    """Return the method that a calibration chose; where nothing is safe, nothing recomputed."""
    return Method(calibrated["policy"], calibrated["ratio"]) if calibrated["safe"] else Method("none", 0.0, "filler")


def outcome_text(calibrated: Mapping[str, Any], outcome: AdaptOutcome) -> str:
    """Return the outcome as one sentence."""
    method = method_of(calibrated)
    speed = next(
        each["ttft_x"]
        for each in calibrated["tried"]
        if (each["policy"], each["ratio"]) == (method.policy, method.ratio)
    )
    beside = (
        f"beside full prefill, which the adapter leaves as it was, KL is {outcome.kl:.3f} nats a token and F1 "
        f"{outcome.f1:.2f}"
    )
    if calibrated["safe"]:
        text = f"Safe at ratio {method.ratio:.0%} ({method.policy}), {speed:.1f} times faster; {beside}."
        fastest = max((each for each in calibrated["tried"] if each["is_safe"]), key=lambda each: float(each["ttft_x"]))
        if fastest["ttft_x"] <= speed:
            return text
        return (
            f"{text} Farther from full prefill, but safe too, and the fastest: {fastest['policy']} at "
            f"{fastest['ratio']:.0%}, {fastest['ttft_x']:.1f} times."
        )
    return f"Not safe at any ratio that was tried; at ratio 0 ({speed:.1f} times faster), {beside}."


def draw_training(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Draw the KL on held-out documents by step, with nothing recomputed, as a picture at `path`."""
    steps = [each.step for each in evaluations]
    with saved(path, (7, 4)) as figure:
        axes = figure.add_subplot()
        axes.plot(steps, [each.kl for each in evaluations], "o-")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("steps")
        axes.set_ylabel("KL to full prefill (nats a token)")
        axes.set_title("Nothing recomputed, held-out documents (lower is better)", fontsize=10)
        axes.grid(True, alpha=0.3)
