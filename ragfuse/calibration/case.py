"""Questions of calibration and benchmarks, the text of prompts, and the check of answers."""

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
    """One question over chunks, with known answers.

    Args:
        dataset: Name of the data set that has the question.
        id: Id of the question in the data set.
        question: The question.
        answers: Known answers. An answer is right if it contains any known answer.
        chunks: Texts of the prompt's chunks, in order. The chunks' KV is stored in advance.
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
"""For each task, the text before the chunks and the text after the chunks of a prompt."""
NEW_TOKENS = MappingProxyType({"answer": 24, "summary": 128})
"""Maximum tokens of an answer, by task."""


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Return `text` in lowercase, without punctuation, articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def is_right(answer: str, golds: Sequence[str]) -> bool:
    """Return True if `answer` contains a known answer of `golds` as whole words."""
    text = f" {normalise(answer)} "
    return any(f" {gold} " in text for gold in map(normalise, golds) if gold)
