"""A measurement with the score of its answer."""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse_bench.scores import exact, score

from ragfuse.calibration.case import Case, Task
from ragfuse.calibration.comparison import Row


@dataclass(frozen=True)
class ScoredRow(Row):
    """The result of one method on one case, with scores.

    Args:
        task: The case's task.
        score: F1 of an answer, ROUGE-L of a summary; None where no answer was generated.
        em: Exact match; None like `score`.
    """

    task: Task = "answer"
    score: float | None = None
    em: float | None = None

    @classmethod
    def of(cls, row: Row, case: Case) -> ScoredRow:
        """Score a row."""
        text = row.text
        return cls(
            **vars(row),
            task=case.task,
            score=None if text is None else score(case.task, text, case.answers),
            em=None if text is None else exact(text, case.answers),
        )
