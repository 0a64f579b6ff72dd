"""Answer a question by several methods, and measure how far each method is from full prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragfuse.calibration.case import NEW_TOKENS, Case
from ragfuse.calibration.methods import Lab, Method
from ragfuse.calibration.runner import Clock, Sample, Stopwatch
from ragfuse.engine.request import ends_of
from ragfuse.engine.runtime import remaining_context
from ragfuse.hf.model import Prefill
from ragfuse.hf.rounding_error import kl
from ragfuse.types.prompt import Prompt

FULL = Method("full", 1.0)


@dataclass(frozen=True)
class Row:
    """The result of one method on one case.

    Args:
        dataset: Name of the data set.
        case: Id of the case.
        method: Name of the method.
        ratio: Recompute ratio of the method. None means the default of the method's policy.
        tokens: Tokens of the prompt.
        cpu_s: Seconds of CPU time of the prefill.
        wall_s: Seconds of wall time of the prefill.
        full_cpu_s: Seconds of CPU time of full prefill on this case.
        full_wall_s: Seconds of wall time of full prefill on this case.
        kl: KL to full prefill in nats per token.
        top1: Top-1 agreement: share of answer tokens with the same argmax as full prefill.
        text: The answer's text. None means that the method generated no answer.
        identical: True if this answer and full prefill's have equal tokens; None without `text`.
        mean_ratio: Share of recomputed tokens, on average over the layers.
        clock: The clock by which methods are compared, "cpu" or "wall".
    """

    dataset: str
    case: str
    method: str
    ratio: float | None
    tokens: int
    cpu_s: float
    wall_s: float
    full_cpu_s: float
    full_wall_s: float
    kl: float | None
    top1: float | None
    text: str | None = None
    identical: bool | None = None
    mean_ratio: float = 0.0
    clock: Clock = "cpu"

    @property
    def by(self) -> tuple[str, str, float | None]:
        """Data set, method and ratio. Rows are grouped by this key."""
        return self.dataset, self.method, self.ratio


def ask(
    lab: Lab,
    stopwatch: Stopwatch,
    case: Case,
    methods: Sequence[Method],
    answers: bool,
) -> Iterator[Row]:
    """Answer one case by full prefill, then by each method, and yield a row for each method.

    Args:
        lab: The engines of one model.
        stopwatch: Times each prefill by both clocks.
        case: The question.
        methods: The methods to compare.
        answers: True if every method generates an answer. If False, only full prefill does.

    Raises:
        InputError: The case exceeds the model's context.
    """
    lab.hold(case, methods)
    prompts = {
        encoded: lab.prompt(case, encoded)
        for encoded in dict.fromkeys(m.encoded for m in (FULL, *methods))
    }
    prompt, max_tokens = prompts[FULL.encoded], NEW_TOKENS[case.task]
    remaining_context(len(prompt) + max_tokens, lab.model, f"{case.dataset} {case.id}")
    full, full_time = _timed(lab, stopwatch, FULL, prompt)
    full_ids = lab.write(full, max_tokens)
    full.rewind()
    forced_ids = [*full_ids, *(ends_of(lab.model)[:1] or (0,))][:max_tokens]
    wanted = lab.model.score_continuation(full, forced_ids)
    for method in methods:
        if method == FULL:
            prefill, time, found, ids = full, full_time, wanted, full_ids
        else:
            prefill, time = _timed(lab, stopwatch, method, prompts[method.encoded])
            ids = lab.write(prefill, max_tokens) if answers else []
            prefill.rewind()
            found = lab.model.score_continuation(prefill, forced_ids)
        has_answer = answers or method == FULL
        yield Row(
            dataset=case.dataset,
            case=case.id,
            method=method.name,
            ratio=method.ratio,
            tokens=len(prompt),
            cpu_s=time.cpu_s,
            wall_s=time.wall_s,
            full_cpu_s=full_time.cpu_s,
            full_wall_s=full_time.wall_s,
            kl=max(0.0, kl(wanted, found)),
            top1=float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
            text=lab.model.text(ids) if has_answer else None,
            identical=ids == full_ids if has_answer else None,
            mean_ratio=prefill.mean_ratio,
            clock=stopwatch.clock,
        )


def _timed(
    lab: Lab, stopwatch: Stopwatch, method: Method, prompt: Prompt
) -> tuple[Prefill, Sample]:
    prefills = list[Prefill]()
    sample = stopwatch.once(lambda: prefills.append(lab.prefill(method, prompt)))
    return prefills[0], sample


def prefill_speedup(rows: Sequence[Row]) -> float:
    """Return the speedup over full prefill, by CPU time on a CPU and by wall time on a GPU."""
    full = sum(row.full_cpu_s if row.clock == "cpu" else row.full_wall_s for row in rows)
    return full / max(1e-9, sum(row.cpu_s if row.clock == "cpu" else row.wall_s for row in rows))
