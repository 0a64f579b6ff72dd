"""One question with its known answers and the chunks of its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["answer", "summary"]


@dataclass(frozen=True)
class Case:
    """One question.

    Args:
        dataset: Name of its data set.
        id: Its id there.
        question: The question.
        answers: Known answers; any of them is right.
        chunks: Texts of the prompt's chunks in order, which are in the store before the question
            comes.
        task: Whether an answer or a summary is wanted.
    """

    dataset: str
    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]
    task: Task = "answer"
