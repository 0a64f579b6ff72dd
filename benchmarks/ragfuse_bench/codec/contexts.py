"""Real text for codecs, of what comes along: contexts with what follows them, and passages with
questions on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from ragfuse.calibration.case import PROMPT_TEXTS
from ragfuse.hf.model import HFModel

FOLLOW = 64
"""Tokens behind a context whose prediction is compared."""
PASSAGES = 6
"""Neighbouring paragraphs that one reading holds."""


@dataclass(frozen=True)
class Context:
    """A text whose KV is coded: ids of a data set's text, and the ids that follow it."""

    dataset: str
    id: str
    token_ids: tuple[int, ...]
    follow: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """One question on a reading: the ids that ask it behind the context, and its known answers."""

    id: str
    token_ids: tuple[int, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """Passages with all questions on them: the context's KV is computed and coded once for all of
    these.
    """

    token_ids: tuple[int, ...]
    questions: tuple[Question, ...]


def read_contexts(model: HFModel, per_set: int, tokens: int) -> list[Context]:
    """At most `per_set` contexts of `tokens` tokens of each set that comes along."""
    sets = {"held-out": _articles(), "demo": _demo()}
    return [
        context
        for name, texts in sets.items()
        for context in islice(_windows(model, name, texts, tokens), per_set)
    ]


def read_questions(model: HFModel, limit: int = 0) -> list[Reading]:
    """The questions that come along, by reading, worded as for every benchmark; 0: all of them."""
    readings, asked = list[Reading](), 0
    for article in held_out():
        paragraphs = article["paragraphs"]
        for at in range(0, len(paragraphs), PASSAGES):
            whole = reading_of(model, paragraphs[at : at + PASSAGES])
            questions = whole.questions[: limit - asked if limit else None]
            asked += len(questions)
            readings.append(Reading(whole.token_ids, questions))
            if limit and asked >= limit:
                return readings
    return readings


def reading_of(model: HFModel, paragraphs: Sequence[Mapping[str, Any]]) -> Reading:
    """These paragraphs of a SQuAD article with all questions on them, worded as for every
    benchmark.
    """
    before, after = PROMPT_TEXTS["answer"]
    passages = "\n\n".join(paragraph["context"].strip() for paragraph in paragraphs)
    head, tail = _in_template(model, f"{before}{passages}", after)
    return Reading((*model.tokens(head, special=True),), tuple(_asked(model, tail, paragraphs)))


def held_out() -> list[dict[str, Any]]:
    """The SQuAD articles that the reader never saw."""
    path = Path(str(files("ragfuse_bench"))) / "sets" / "squad_held_out.json"
    articles: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["data"]
    return articles


def _in_template(model: HFModel, text: str, after: str) -> tuple[str, str]:
    """The model's chat template around a user's message, parted where the question begins."""
    said = [{"role": "user", "content": text + after}]
    if not getattr(model.tokenizer, "chat_template", None):
        return text, after
    whole = str(
        model.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    )
    head, found, tail = whole.partition(after)
    return (head, found + tail) if found else (text, after)


def _asked(
    model: HFModel, tail: str, paragraphs: Sequence[Mapping[str, Any]]
) -> Iterator[Question]:
    for paragraph in paragraphs:
        for qa in paragraph["qas"]:
            answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
            if answers and not qa.get("is_impossible"):
                ids = model.tokens(tail.replace("{question}", qa["question"].strip()), special=True)
                yield Question(str(qa["id"]), tuple(ids), answers)


def _windows(model: HFModel, name: str, texts: Iterable[str], tokens: int) -> Iterator[Context]:
    """Contexts from one stream of texts, one behind the other; what is left over at the end is too
    short.
    """
    held: list[int] = []
    count = 0
    for text in texts:
        for paragraph in text.split("\n\n"):
            held += model.tokens(f"{paragraph}\n\n")
        while len(held) >= tokens + FOLLOW:
            ids = [*model.bos, *held][: tokens + FOLLOW]
            yield Context(name, str(count), tuple(ids[:tokens]), tuple(ids[tokens:]))
            held, count = held[tokens + FOLLOW :], count + 1


def _articles() -> Iterator[str]:
    for article in held_out():
        yield "\n\n".join(paragraph["context"].strip() for paragraph in article["paragraphs"])


def _demo() -> Iterator[str]:
    folder = Path(str(files("ragfuse"))) / "demo" / "corpus"
    yield from (path.read_text("utf-8").strip() for path in sorted(folder.glob("*.md")))
