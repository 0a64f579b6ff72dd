"""What came of an adapter: the adapted model beside the plain one's full prefill, on held-out documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
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
class PlainAnswer:
    """The plain model's full prefill of one question: its answer, and the logits that predict it.

    Args:
        token_ids: The answer without end tokens.
        forced_ids: The tokens that distances are measured along, at least one.
        logits: float32 [len(forced_ids), V].
    """

    token_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]
    logits: torch.Tensor


@dataclass(frozen=True)
class AdaptOutcome:
    """What an adapter changes, on questions about held-out documents.

    Args:
        questions: Number of questions.
        kl: KL of the adapted model, fused, to the plain model's full prefill, in nats per token of its answers.
        f1: F1 of the adapted model's fused answers, with the plain model's by full prefill as the right ones.
        kl_full: KL of the adapted model's full prefill to the plain model's.
        changed: Share of full-prefill answers that are other tokens than the plain model's.
    """

    questions: int
    kl: float
    f1: float
    kl_full: float
    changed: float


def plain_answers(lab: Lab, cases: Sequence[Case], console: Console) -> list[PlainAnswer]:
    """Return the plain model's answers by full prefill.

    Args:
        lab: A lab of the plain model, or of the one with an adapter while that is switched off.
        cases: The questions.
        console: Where progress is shown.
    """
    model, found = lab.model, list[PlainAnswer]()
    ends = ends_of(model)
    with progress(console) as bar:
        for case in bar.track(cases, description="plain answers"):
            prompt, count = lab.prompt(case), NEW_TOKENS[case.task]
            full = model.full_prefill(prompt.token_ids)
            said = tuple(lab.write(full.copy(), count))
            forced = (*said, *(ends[:1] or (0,)))[:count]
            found.append(PlainAnswer(said, forced, model.score_continuation(full, forced)))
    return found


def compare(
    lab: Lab, cases: Sequence[Case], plain: Sequence[PlainAnswer], method: Method, console: Console
) -> AdaptOutcome:
    """Compare the adapted model, by full prefill and by a method, with the plain model's answers.

    Args:
        lab: A lab of the adapted model.
        cases: The questions.
        plain: The plain model's answers to them.
        method: How the adapted model is fused.
        console: Where progress is shown.
    """
    model, scores, distances, full_distances, changed = lab.model, list[float](), [], [], []
    with progress(console) as bar:
        for case, wanted in bar.track(list(zip(cases, plain, strict=True)), description="comparing"):
            lab.hold(case, [method])
            prompt, count = lab.prompt(case), NEW_TOKENS[case.task]
            full, fused = (lab.prefill(each, prompt) for each in (FULL, method))
            changed.append(tuple(lab.write(full.copy(), count)) != wanted.token_ids)
            text = model.text(lab.write(fused.copy(), count))
            scores.append(f1(text, (model.text(wanted.token_ids),)))
            found = (model.score_continuation(each, wanted.forced_ids) for each in (full, fused))
            whole, parts = (max(0.0, kl(wanted.logits, each)) for each in found)
            full_distances.append(whole)
            distances.append(parts)
    return AdaptOutcome(len(cases), mean(distances), mean(scores), mean(full_distances), mean(changed))


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
        f"beside the plain model's full prefill KL is {outcome.kl:.3f} nats a token and F1 {outcome.f1:.2f}, and "
        f"{outcome.changed:.0%} of full-prefill answers changed"
    )
    if calibrated["safe"]:
        return f"Safe at ratio {method.ratio:.0%} ({method.policy}), {speed:.1f} times faster; {beside}."
    return f"Not safe at any ratio that was tried; at ratio 0 ({speed:.1f} times faster), {beside}."


def draw_training(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Draw the KL on held-out documents by step, nothing recomputed and by full prefill, as a picture at `path`."""
    steps = [each.step for each in evaluations]
    with saved(path, (7, 4)) as figure:
        axes = figure.add_subplot()
        axes.plot(steps, [each.kl for each in evaluations], "o-", label="chunks reused, nothing recomputed")
        axes.plot(steps, [each.kl_full for each in evaluations], "s--", label="full prefill")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("steps")
        axes.set_ylabel("held-out KL to the plain model, nats a token")
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8)
