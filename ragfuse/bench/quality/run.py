"""`ragfuse bench quality`: every method on the same prompts, measured question by question.

Each measurement is one line of a rows file beside the result. A run that was interrupted goes on where it stopped, and
one with more methods measures only those.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from ragfuse.bench.quality.cases import Case, Packing, read_cases
from ragfuse.bench.quality.chains import CHAINS, run_chain
from ragfuse.bench.quality.methods import Lab, Method
from ragfuse.bench.quality.metrics import exact, f1, rouge_l
from ragfuse.bench.quality.wording import NEW_TOKENS
from ragfuse.bench.runner import Clock, Runner, malloc_setting, progress, versions
from ragfuse.engine.options import ends_of, remaining_context
from ragfuse.errors import InputError
from ragfuse.hf.model import HFModel
from ragfuse.hf.packed import can_pack
from ragfuse.hf.rounding_error import kl
from ragfuse.types.keys import digest
from ragfuse.types.prompt import Prompt

FULL = Method("full", 1.0)


@dataclass(frozen=True)
class Row:
    """One method on one case. Times of the prefill, of full prefill's beside it in the same round; kl in nats a token.

    score: F1 of an answer, ROUGE-L of a summary; None with `em` and `identical` where no answer was written.
    kl, top1: None for methods that are no way to prefill one prompt. clock: which of the times counts.
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
    score: float | None = None
    em: float | None = None
    identical: bool | None = None
    mean_ratio: float = 0.0
    task: str = "answer"
    text: str = ""
    clock: Clock = "cpu"

    @property
    def by(self) -> tuple[str, str, float | None]:
        """What it measures: data set, method, ratio."""
        return self.dataset, self.method, self.ratio


@dataclass(frozen=True)
class Plan:
    """What to measure: cases of each set (0: all), whether answers are written, where the rows are kept."""

    sets: tuple[str, ...]
    methods: tuple[Method, ...] = ()
    limit: int = 0
    answers: bool = True
    chunk_tokens: int = 0
    context_tokens: int = 2600
    passages: int = 6
    rows: Path | None = None


def measure(plan: Plan, model: HFModel, console: Console) -> list[Row]:
    """All rows of the plan, those that the rows file already has included."""
    packing = Packing(lambda text: len(model.tokens(text)), plan.chunk_tokens, plan.context_tokens, plan.passages)
    cases = [case for name in plan.sets for case in drawn(read_cases(name, packing), plan.limit)]
    lab, runner = Lab(model), Runner(1, model.device, console)
    methods = tuple(dict.fromkeys((FULL, *plan.methods)))
    chains = [method.policy for method in methods if method.policy in CHAINS]
    if chains and any(case.task == "summary" for case in cases):
        raise InputError(f"{', '.join(chains)} answer questions; a data set asks for summaries. Leave one out.")
    kept, stamps = _read(plan.rows), {case: _stamp(plan, lab, case) for case in cases}
    rows = {(case.id, *row.by): row for case, stamp in stamps.items() for row in kept.get(stamp, {}).values()}
    try:
        with progress(console) as bar:
            task = bar.add_task("questions", total=len(cases))
            warm = False
            for case in cases:
                done = {method: rows.get((case.id, case.dataset, method.name, method.ratio)) for method in methods}
                missing = [method for method, row in done.items() if not _is_done(row, plan.answers)]
                bar.update(task, description=f"{case.dataset}: {len(missing)} methods")
                if missing:
                    if not warm:
                        list(ask(lab, runner, case, methods, False))
                        warm = True
                    for row in ask(lab, runner, case, missing, plan.answers):
                        rows[row.case, *row.by] = row
                        _append(plan.rows, stamps[case], row)
                bar.advance(task)
    finally:
        lab.close()
    wanted = [(case.id, case.dataset, m.name, m.ratio) for case in cases for m in methods]
    return [rows[key] for key in wanted]


def drawn(cases: Sequence[Case], limit: int) -> list[Case]:
    """At most `limit` of the cases, drawn from a fixed seed; 0: all."""
    return list(cases) if not limit or limit >= len(cases) else random.Random(0).sample(list(cases), limit)


def ask(lab: Lab, runner: Runner, case: Case, methods: Sequence[Method], answers: bool) -> Iterator[Row]:
    """One case by full prefill, then by each method. InputError if it does not fit into the model."""
    lab.hold(case, methods)
    prompts = {encoded: lab.prompt(case, encoded) for encoded in dict.fromkeys(m.encoded for m in (FULL, *methods))}
    prompt, most = prompts[FULL.encoded], NEW_TOKENS[case.task]
    remaining_context(len(prompt) + most, lab.model, f"{case.dataset} {case.id}")
    full = _timed(lab, runner, FULL, prompt)
    said = lab.write(full.prefill.copy(), most)
    along = [*said, *(ends_of(lab.model)[:1] or (0,))][:most]
    wanted = lab.model.score_continuation(full.prefill, along)
    for method in methods:
        if method.policy in CHAINS:
            yield replace(_by_chain(lab, case, method, full, said, len(prompt)), clock=runner.clock)
            continue
        mine = prompts[method.encoded]
        if mine.token_ids != prompt.token_ids:
            raise InputError(f"The prompt of {case.id} differs between ways of encoding; this is a defect.")
        lab.before(method, mine)
        done = full if method == FULL else _timed(lab, runner, method, mine)
        if method == FULL:
            found, ids = wanted, said
        else:
            ids = lab.write(done.prefill.copy(), most) if answers else []
            found = lab.model.score_continuation(done.prefill, along)
        text = lab.model.text(ids)
        yield Row(
            dataset=case.dataset,
            case=case.id,
            method=method.name,
            ratio=method.ratio,
            tokens=len(prompt),
            cpu_s=done.cpu_s,
            wall_s=done.wall_s,
            full_cpu_s=full.cpu_s,
            full_wall_s=full.wall_s,
            kl=max(0.0, kl(wanted, found)),
            top1=float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
            score=_score(case, text) if answers or method == FULL else None,
            em=exact(text, case.answers) if answers or method == FULL else None,
            identical=ids == said if answers or method == FULL else None,
            mean_ratio=done.prefill.mean_ratio,
            task=case.task,
            text=text,
            clock=runner.clock,
        )


def _by_chain(lab: Lab, case: Case, method: Method, full: _Timed, said: Sequence[int], n_tokens: int) -> Row:
    """What a chain says."""
    told = run_chain(method.policy, lab.engine(method.encoded), case, NEW_TOKENS[case.task])
    return Row(
        dataset=case.dataset,
        case=case.id,
        method=method.name,
        ratio=method.ratio,
        tokens=n_tokens,
        cpu_s=told.cpu_s,
        wall_s=told.wall_s,
        full_cpu_s=full.cpu_s,
        full_wall_s=full.wall_s,
        kl=None,
        top1=None,
        score=_score(case, told.text),
        em=exact(told.text, case.answers),
        identical=told.text == lab.model.text(said).strip(),
        task=case.task,
        text=told.text,
    )


@dataclass
class _Timed:
    prefill: Any
    cpu_s: float
    wall_s: float


def _timed(lab: Lab, runner: Runner, method: Method, prompt: Prompt) -> _Timed:
    kept: list[Any] = []
    sample = runner.once(lambda: kept.append(lab.prefill(method, prompt)))
    return _Timed(kept[0], sample.cpu_s, sample.wall_s)


def _score(case: Case, text: str) -> float:
    return rouge_l(text, case.answers) if case.task == "summary" else f1(text, case.answers)


def _is_done(row: Row | None, answers: bool) -> bool:
    return row is not None and (not answers or row.score is not None)


def _stamp(plan: Plan, lab: Lab, case: Case) -> str:
    """What a kept row must share with this run: model, machine, settings, and the case itself."""
    settings, model = lab.settings, lab.model
    where = (
        str(model.device),
        torch.get_num_threads(),
        malloc_setting(),
        versions(),
        can_pack(model.device, model.dtype),
    )
    how = plan.chunk_tokens, plan.context_tokens, plan.passages, settings.filler_tokens, settings.min_chunk_tokens
    parts = case.dataset, case.id, case.question, *case.answers, *case.chunks
    return digest(model.fingerprint, str(where), str(how), *parts)[:16]


def _read(path: Path | None) -> dict[str, dict[tuple[str, str, float | None], Row]]:
    """Kept rows by their stamp and by what they measure; of equal ones the last."""
    kept: dict[str, dict[tuple[str, str, float | None], Row]] = defaultdict(dict)
    if path is None or not path.exists():
        return kept
    text = path.read_text("utf-8")
    if text and not text.endswith("\n"):
        path.write_text(text + "\n", encoding="utf-8")
    for line in text.splitlines():
        try:
            said = json.loads(line)
            stamp, row = said.pop("stamp"), Row(**said)
            kept[stamp][row.by] = row
        except (ValueError, TypeError, KeyError):
            continue  # a line that was cut off when the run was killed: measured again
    return kept


def _append(path: Path | None, stamp: str, row: Row) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(row), "stamp": stamp}, ensure_ascii=False) + "\n")


def seconds_saved(rows: Sequence[Row]) -> float:
    """How many times sooner the first token comes: full prefill's time over the method's, summed over questions.

    CPU time on a CPU, the wall on an accelerator.
    """
    full = sum(row.full_cpu_s if row.clock == "cpu" else row.full_wall_s for row in rows)
    return full / max(1e-9, sum(row.cpu_s if row.clock == "cpu" else row.wall_s for row in rows))


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a column; None where it was not measured."""
    values = [getattr(row, name) for row in rows]
    return None if any(value is None for value in values) else float(mean(values))
