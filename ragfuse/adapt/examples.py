"""Training examples: several passages in one prompt wording, with questions about the passages.

`DocumentExamples` generates examples from a user's documents. No known answers are needed: the
targets are the model's own answers by full prefill.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragfuse.calibration.calibrate import (
    MIN_PASSAGE_CHARS,
    PROMPT_PASSAGES,
    Chunk,
    passages_with,
    topics,
    word_counts,
)
from ragfuse.calibration.case import PROMPT_TEXTS
from ragfuse.errors import InputError

Examples = Callable[[int], "Example"]
"""A function from a number to an example. A number gives the same example in every process."""
HELD_SHARE = 0.15
"""Minimum share of the chunks that is held out of training."""
HELD_CHUNKS = PROMPT_PASSAGES + 2
"""Minimum number of held-out chunks; calibration needs this many chunks for its prompts."""
MIN_CHUNKS = 3 * HELD_CHUNKS
"""Minimum number of chunks for a training, held-out chunks included."""
SIZES = (2, 3, 4, 4, 5, 6, 6)
"""A context's number of chunks is a random entry of this tuple. All entries have equal odds."""
MAX_QUESTIONS = 10
"""Maximum questions per context."""
ABOUT_ONE = (
    *(4 * ("What is said about {}?",)),
    "What is {}?",
    "Explain {} in a few words.",
    "Why does {} matter?",
    "Quote the sentence that mentions {}.",
)
ABOUT_TWO = (
    "What is said about {}, and what about {}?",
    "What do {} and {} have in common?",
    "How is {} connected with {}?",
    "Which of the passages speaks of {}, and which of {}?",
)


@dataclass(frozen=True)
class Template:
    """A prompt's wording: {context} in `system` or `user`, then {question} in `user`.

    Each passage of the context is formatted by `passage`. `between` separates the passages.
    """

    system: str
    user: str
    between: str = "\n\n"
    passage: str = "{text}"


TEMPLATES = (
    *(6 * (Template("", "{context}".join(PROMPT_TEXTS["answer"])),)),
    Template("", "{context}\n\nQuestion: {question}"),
    Template("", "{context}\n\n{question} Answer in a few words."),
    Template(
        "You answer from the documents you are given, as briefly as you can.",
        "Documents:\n{context}\n\n{question}",
    ),
    Template(
        "Answer the user's question from this context only. Be brief.\n\nContext:\n{context}",
        "{question}",
    ),
    Template(
        "",
        "Context:\n----------\n{context}\n----------\nAnswer from the context alone.\nQuestion:"
        " {question}\nAnswer: ",
    ),
    Template(
        "",
        "Read these passages.\n\n{context}\n\nWhat is the short answer to: {question}",
        passage="{title}\n{text}",
    ),
)
"""Wordings, drawn with equal odds. The first six are copies of the demo and benchmark wording."""


@dataclass(frozen=True)
class Example:
    """Several passages, and questions about the passages. Each question gets its own prompt."""

    template: Template
    passages: tuple[str, ...]
    questions: tuple[str, ...]


def split_chunks(chunks: Sequence[Chunk], seed: int) -> tuple[list[Chunk], list[Chunk]]:
    """Split chunks into training chunks and held-out chunks.

    Random whole documents are held out. If the held-out documents have more than half of all
    chunks, the last held-out document is split between training and held-out chunks.

    Args:
        chunks: The chunks. Chunks under `MIN_PASSAGE_CHARS` characters are dropped.
        seed: Seed of the random order.

    Raises:
        InputError: There are too few chunks.
    """
    long = [chunk for chunk in chunks if len(chunk[0]) >= MIN_PASSAGE_CHARS]
    if len(long) < MIN_CHUNKS:
        raise InputError(
            f"Training needs at least {MIN_CHUNKS} chunks of {MIN_PASSAGE_CHARS} characters or"
            f" more, but the documents have {len(long)}. Give more documents."
        )
    sources = sorted({source for _, source in long})
    random.Random(seed).shuffle(sources)
    long.sort(key=lambda chunk: sources.index(chunk[1]))
    least = max(HELD_CHUNKS, round(HELD_SHARE * len(long)))
    borders = (at for at in range(least, len(long) // 2 + 1) if long[at - 1][1] != long[at][1])
    cut = next(borders, least)
    return long[cut:], long[:cut]


class DocumentExamples:
    """Generates examples from a user's documents.

    Args:
        chunks: The chunks of all documents.
        seed: Seed of all random choices.
    """

    def __init__(self, chunks: Sequence[Chunk], seed: int) -> None:
        self._chunks = chunks
        self._seed = seed
        self._seen = word_counts(chunks)

    def example(self, number: int) -> Example:
        """Return the example with this number. Every process gets the same example."""
        generator = random.Random(f"{self._seed} {number}")
        about, count = generator.choice(self._chunks), generator.choice(SIZES)
        chosen = passages_with(about, self._chunks, count, generator)
        asked = list(dict.fromkeys(self._questions([text for text, _ in chosen], generator)))
        template = generator.choice(TEMPLATES)
        texts = tuple(
            template.passage.format(title=_title(source), text=text) for text, source in chosen
        )
        return Example(template, texts, tuple(asked[:MAX_QUESTIONS]))

    def _questions(self, texts: Sequence[str], generator: random.Random) -> Iterator[str]:
        """Yield, in turn, questions on one chunk, on a gap in a sentence, and on two chunks."""
        about = [topics(text, self._seen)[:4] for text in texts]
        one = [generator.choice(ABOUT_ONE).format(topic) for each in about for topic in each]
        gaps = [question for text in texts for question in gap_questions(text, generator)]
        two = []
        for _ in range(MAX_QUESTIONS):
            pair = generator.sample(about, 2) if len(about) > 1 else 2 * about
            two.append(generator.choice(ABOUT_TWO).format(*map(generator.choice, pair)))
        kinds = one, gaps, two
        for questions in kinds:
            generator.shuffle(questions)
        while any(kinds):
            for questions in filter(None, kinds):
                yield questions.pop()


def gap_questions(text: str, generator: random.Random) -> Iterator[str]:
    """Yield questions that quote a sentence of a text with one name or number left out."""
    for sentence in re.split(r"(?<=[a-z0-9)][.]) (?=[A-Z])", text):
        named = (
            r"(?<=[a-z,] )(?:[A-Z][a-z]+(?: [A-Z][a-z]+)+|\d{4}|\d+ (?:million|percent|km))(?=["
            r" ,.])"
        )
        gaps = list(re.finditer(named, sentence))
        if gaps and 8 <= len(sentence.split()) <= 30:
            gap = generator.choice(gaps)
            yield f"What stands for the blank: {sentence[: gap.start()]}____{sentence[gap.end() :]}"


def _title(name: str) -> str:
    """Return a document's title from its file name."""
    return " ".join(word.capitalize() for word in Path(name).stem.replace("_", "-").split("-"))
