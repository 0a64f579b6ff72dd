"""What changed KV does to answers: F1 on questions over passages, beside raw KV's, and agreement
along raw's answers.

Every reading's KV is computed once, and changed once for each way; all of its questions are asked
behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ragfuse_bench.codec.contexts import Question, Reading
from ragfuse_bench.codec.kv import Continued, Said
from ragfuse_bench.scores import difference_interval, f1
from rich.console import Console

from ragfuse.calibration.case import NEW_TOKENS
from ragfuse.calibration.stats import mean_interval
from ragfuse.hf.model import HFModel
from ragfuse.hf.rounding_error import kl
from ragfuse.telemetry.progress import progress
from ragfuse.types.kv import ChunkKV

RAW = "raw"
WORTH = 0.3
"""The least F1 of raw KV at which a difference of F1 says anything."""
Change = Callable[[ChunkKV], ChunkKV]


@dataclass(frozen=True)
class Row:
    """One question answered one way: its F1, and how close the distribution stays along raw KV's
    own answer.
    """

    question: str
    f1: float
    same: bool
    kl: float
    top1: float


class Judge:
    """Raw KV's answers to the questions on a reading, to compare other KV's with."""

    def __init__(self, model: HFModel, reading: Reading, kv: ChunkKV) -> None:
        self._model, self._questions = model, reading.questions
        raw = Continued(model, kv)
        self._told = [
            raw.answer(question.token_ids, NEW_TOKENS["answer"]) for question in reading.questions
        ]
        self.raw = [self._row(*each) for each in self._asked(self._told)]

    def rows(self, kv: ChunkKV) -> list[Row]:
        """The answers over other KV of the same context."""
        other = Continued(self._model, kv)
        mine = [
            other.answer(question.token_ids, NEW_TOKENS["answer"], wanted.token_ids)
            for question, wanted in zip(self._questions, self._told, strict=True)
        ]
        return [self._row(*each) for each in self._asked(mine)]

    def _asked(self, mine: Sequence[Said]) -> Iterator[tuple[Question, Said, Said]]:
        return zip(self._questions, self._told, mine, strict=True)

    def _row(self, question: Question, wanted: Said, mine: Said) -> Row:
        same = (mine.along.argmax(-1) == wanted.along.argmax(-1)).float().mean()
        score = f1(self._model.text(mine.token_ids), question.answers)
        away = max(0.0, kl(wanted.along, mine.along))
        return Row(question.id, score, mine.token_ids == wanted.token_ids, away, float(same))


def ask_all(
    readings: Sequence[Reading], model: HFModel, ways: Mapping[str, Change], console: Console
) -> dict[str, list[Row]]:
    """Every question by raw KV and each way of changing it, in order."""
    found = defaultdict[str, list[Row]](list)
    with progress(console) as bar:
        for reading in bar.track(readings, description="questions"):
            kv = model.encode(reading.token_ids)
            judge = Judge(model, reading, kv)
            found[RAW] += judge.raw
            for name, change in ways.items():
                found[name] += judge.rows(change(kv))
    return dict(found)


def scores(found: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, Any]]:
    """By way: n, F1 and its difference to raw KV's with 95% intervals, share of equal answers, KL
    and top-1.
    """
    raw = [row.f1 for row in found[RAW]]
    return {name: _score(rows, raw) for name, rows in found.items()}


def _score(rows: Sequence[Row], raw: Sequence[float]) -> dict[str, Any]:
    mine = [row.f1 for row in rows]
    return {
        "n": len(rows),
        "f1": mean(mine),
        "f1_ci": list(mean_interval(mine)),
        "f1_delta": mean(mine) - mean(raw),
        "f1_delta_ci": list(difference_interval(mine, raw)),
        "same_answer": mean(float(row.same) for row in rows),
        "kl_answers": mean(row.kl for row in rows),
        "top1_answers": mean(row.top1 for row in rows),
    }
