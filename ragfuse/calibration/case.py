"""One question with its known answers and the chunks of its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["answer", "summary"]


@dataclass(frozen=True)
class Case:
    """One prompt to be answered.

    chunks: texts in the prompt's order, which a store would hold before the question comes.
    """

    dataset: str
    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]
    task: Task = "answer"
