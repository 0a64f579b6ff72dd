"""One question of calibration and benchmarks: its prompt, and the check of an answer."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Task = Literal["answer", "summary"]


@dataclass(frozen=True)
class Case:
    """One question.

    Args:
        dataset: Name of its data set.
        id: Its id in the data set.
        question: The question.
        answers: Known answers; any of them is right.
        chunks: Texts of the prompt's chunks in order; stored before the question is asked.
        task: The requested output: "answer" or "summary".
    """

    dataset: str
    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]
    task: Task = "answer"


PROMPT_TEXTS = MappingProxyType(
    {
        "answer": (
            "Use the following passages to answer the question at the end in a few words.\n\n",
            "\n\nQuestion: {question}\nAnswer:",
        ),
        "summary": (
            "Here are several passages.\n\n",
            "\n\n{question}Write a summary of all of them in one paragraph.",
        ),
    }
)
"""By task: the text before and the text after the chunks."""
NEW_TOKENS = MappingProxyType({"answer": 24, "summary": 128})
"""Maximum tokens of an answer, by task."""


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Return `text` in lowercase, without punctuation, articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def is_right(answer: str, golds: Sequence[str]) -> bool:
    """Return whether `answer` contains a known answer as whole words; empty ones never match."""
    text = f" {normalise(answer)} "
    return any(f" {gold} " in text for gold in map(normalise, golds) if gold)
