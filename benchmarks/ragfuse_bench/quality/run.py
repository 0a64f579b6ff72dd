"""`ragfuse bench quality`: every method on the same prompts, measured question by question.

Each measurement is one line of a rows file beside the result. A run that was interrupted goes on
where it stopped, and one with more methods measures only those.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from ragfuse_bench.options import QualityOptions
from ragfuse_bench.quality.cases import Packing, read_cases
from ragfuse_bench.quality.methods import QualityLab
from ragfuse_bench.quality.scored import ScoredRow
from rich.console import Console

from ragfuse.calibration.case import Case
from ragfuse.calibration.comparison import FULL, ask
from ragfuse.calibration.methods import Lab, Method
from ragfuse.calibration.runner import Stopwatch, malloc_setting, versions
from ragfuse.hf.model import HFModel
from ragfuse.hf.packed_linear import can_pack
from ragfuse.telemetry.progress import progress
from ragfuse.types.keys import digest


@dataclass(frozen=True)
class Plan:
    """What to measure: the options, the methods that they name, and the file that keeps the rows
    (None: none).
    """

    options: QualityOptions
    methods: tuple[Method, ...] = ()
    rows: Path | None = None


def measure(plan: Plan, model: HFModel, console: Console) -> list[ScoredRow]:
    """All rows of the plan, those that the rows file already has included."""
    options = plan.options
    packing = Packing(
        lambda text: len(model.tokens(text)),
        options.chunk_tokens,
        options.context_tokens,
        options.passages,
    )
    cases = [
        case
        for name in plan.options.sets
        for case in drawn(read_cases(name, packing), plan.options.limit)
    ]
    lab, stopwatch = QualityLab(model), Stopwatch(model.device)
    methods = tuple(dict.fromkeys((FULL, *plan.methods)))
    kept, stamps = _read(plan.rows), {case: _stamp(plan, lab, case) for case in cases}
    rows = {
        (case.id, *row.by): row
        for case, stamp in stamps.items()
        for row in kept.get(stamp, {}).values()
    }
    try:
        with progress(console) as bar:
            task = bar.add_task("questions", total=len(cases))
            warm = False
            for case in cases:
                done = {
                    method: rows.get((case.id, case.dataset, method.name, method.ratio))
                    for method in methods
                }
                missing = [
                    method
                    for method, row in done.items()
                    if not _is_done(row, plan.options.answers)
                ]
                bar.update(task, description=f"{case.dataset}: {len(missing)} methods")
                if missing:
                    if not warm:
                        list(ask(lab, stopwatch, case, methods, False))
                        warm = True
                    for found in ask(lab, stopwatch, case, missing, plan.options.answers):
                        row = ScoredRow.of(found, case)
                        rows[row.case, *row.by] = row
                        _append(plan.rows, stamps[case], row)
                bar.advance(task)
    finally:
        lab.close()
    wanted = [(case.id, case.dataset, m.name, m.ratio) for case in cases for m in methods]
    return [rows[key] for key in wanted]


def drawn(cases: Sequence[Case], limit: int) -> list[Case]:
    """At most `limit` of the cases, drawn from a fixed seed; 0: all."""
    return (
        list(cases)
        if not limit or limit >= len(cases)
        else random.Random(0).sample(list(cases), limit)
    )


def _is_done(row: ScoredRow | None, answers: bool) -> bool:
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
    how = (
        plan.options.chunk_tokens,
        plan.options.context_tokens,
        plan.options.passages,
        lab.engine("filler").runtime.encoder.filler_tokens,
        settings.min_chunk_tokens,
    )
    parts = case.dataset, case.id, case.question, *case.answers, *case.chunks
    return digest(model.fingerprint, str(where), str(how), *parts)[:16]


def _read(path: Path | None) -> dict[str, dict[tuple[str, str, float | None], ScoredRow]]:
    """Kept rows by their stamp and by what they measure; of equal ones the last."""
    kept: dict[str, dict[tuple[str, str, float | None], ScoredRow]] = defaultdict(dict)
    if path is None or not path.exists():
        return kept
    text = path.read_text("utf-8")
    if text and not text.endswith("\n"):
        path.write_text(text + "\n", encoding="utf-8")
    for line in text.splitlines():
        try:
            said = json.loads(line)
            stamp, row = said.pop("stamp"), ScoredRow(**said)
            kept[stamp][row.by] = row
        except (ValueError, TypeError, KeyError):
            continue  # a line that was cut off when the run was killed: measured again
    return kept


def _append(path: Path | None, stamp: str, row: ScoredRow) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(row), "stamp": stamp}, ensure_ascii=False) + "\n")
