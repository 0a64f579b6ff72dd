"""Training examples: a context of several passages under one wording of the prompt, and questions about them.

`DocumentExamples` makes them of a user's documents. Nothing has to be answered by hand: the model's own answers over a
full prefill are what is taught.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ragfuse.adapt.rules import Passage, Question, questions
from ragfuse.calibration.calibrate import MIN_PASSAGE_CHARS, PROMPT_PASSAGES, topics, words_of
from ragfuse.calibration.prompts import PROMPT_TEXTS
from ragfuse.errors import InputError

Documents = Sequence[tuple[str, Sequence[str]]]
"""(name, chunks) of each document."""
HELD_SHARE = 0.15
"""Share of the chunks that is held out of training."""
HELD_CHUNKS = PROMPT_PASSAGES + 2
"""Least number of chunks that are held out, so that calibration can ask about them."""
MIN_CHUNKS = 3 * HELD_CHUNKS
"""Least number of chunks to train on a part of."""
WHOLE_DOCUMENTS = 5
"""From so many documents on whole ones are held out, else the last chunks of each."""
SIZES = (2, 3, 4, 4, 5, 6, 6)
"""Numbers of chunks that contexts have, equally often."""
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
    """How a prompt is worded: `system` and `user` hold {context} in one of them, {question} in `user` behind it."""

    system: str
    user: str
    between: str = "\n\n"
    passage: str = "{text}"


TEMPLATES = (
    (6, Template("", "{context}".join(PROMPT_TEXTS["answer"]))),
    (1, Template("", "{context}\n\nQuestion: {question}")),
    (1, Template("", "{context}\n\n{question} Answer in a few words.")),
    (
        1,
        Template(
            "You answer from the documents you are given, as briefly as you can.", "Documents:\n{context}\n\n{question}"
        ),
    ),
    (1, Template("Answer the user's question from this context only. Be brief.\n\nContext:\n{context}", "{question}")),
    (
        1,
        Template(
            "",
            "Context:\n----------\n{context}\n----------\nAnswer from the context alone.\n"
            "Question: {question}\nAnswer: ",
        ),
    ),
    (
        1,
        Template(
            "",
            "Read these passages.\n\n{context}\n\nWhat is the short answer to: {question}",
            passage="{title}\n{text}",
        ),
    ),
)
"""Weighted. The first is the demo's and the benchmarks' own."""


@dataclass(frozen=True)
class Example:
    """One context and several questions, each asked as if it alone had been.

    Args:
        template: The wording of the prompt.
        passages: Texts of the context's chunks, in order.
        questions: The questions; their answers are "" where nobody knows them.
    """

    template: Template
    passages: tuple[str, ...]
    questions: tuple[Question, ...]


def draw_template(generator: random.Random) -> Template:
    """Return a wording, drawn by weight."""
    return generator.choices([template for _, template in TEMPLATES], [weight for weight, _ in TEMPLATES])[0]


def split_documents(documents: Documents, seed: int) -> tuple[Documents, Documents]:
    """Return the documents to train on and those that are held out.

    Args:
        documents: The documents.
        seed: Seed of the choice.

    Raises:
        InputError: They have too few chunks.
    """
    kept = [(name, [text for text in texts if len(text) >= MIN_PASSAGE_CHARS]) for name, texts in documents]
    kept = [(name, texts) for name, texts in kept if texts]
    total = sum(len(texts) for _, texts in kept)
    if total < MIN_CHUNKS:
        raise InputError(
            f"Wanted documents of at least {MIN_CHUNKS} chunks to learn from, found {total}. Give more documents, or "
            "make smaller chunks with RAGFUSE_CHUNK_TOKENS."
        )
    wanted = max(HELD_CHUNKS, round(HELD_SHARE * total))
    if len(kept) >= WHOLE_DOCUMENTS:
        order = list(range(len(kept)))
        random.Random(seed).shuffle(order)
        held, count = set[int](), 0
        for index in order:
            size = len(kept[index][1])
            if count < wanted and count + size <= total // 2:
                held.add(index)
                count += size
        if count >= HELD_CHUNKS:
            return [each for i, each in enumerate(kept) if i not in held], [kept[i] for i in sorted(held)]
    train, apart = [], []
    for name, texts in kept:
        cut = len(texts) - -(-len(texts) * wanted // total)
        train.append((name, texts[:cut]))
        apart.append((name, texts[cut:]))
    return [each for each in train if each[1]], [each for each in apart if each[1]]


class NumberedExamples(Protocol):
    """Examples by number: the same number gives the same example in any process."""

    def example(self, number: int) -> Example:
        """Return the example of a number."""
        ...


class DocumentExamples:
    """Examples of a user's documents, by number: the same number gives the same example in any process.

    Args:
        documents: The documents.
        seed: Seed of all choices.
        most: Most questions of a context.
    """

    def __init__(self, documents: Documents, seed: int, most: int) -> None:
        self._chunks = [(name, text) for name, texts in documents for text in texts]
        self._seed, self._most = seed, most
        self._seen = Counter(word for _, text in self._chunks for word in set(words_of(text)))

    def example(self, number: int) -> Example:
        """Return the example of a number: chunks of which about half are neighbours, and questions about them."""
        generator = random.Random(f"{self._seed} {number}")
        chosen = self._choose(generator)
        asked = list(dict.fromkeys(self._questions(chosen, generator)))[: self._most]
        template = draw_template(generator)
        texts = tuple(template.passage.format(title=_title(name), text=text) for name, text in chosen)
        return Example(template, texts, tuple(asked))

    def _choose(self, generator: random.Random) -> list[tuple[str, str]]:
        count = min(generator.choice(SIZES), len(self._chunks))
        first = generator.randrange(len(self._chunks))
        name = self._chunks[first][0]
        near = [i for i in range(first - 3, first + 4) if 0 <= i < len(self._chunks) and self._chunks[i][0] == name]
        near.remove(first)
        mates = generator.sample(near, min(len(near), count // 2 if generator.random() < 0.7 else 0))
        rest = [i for i in range(len(self._chunks)) if i != first and i not in mates]
        chosen = [first, *mates, *generator.sample(rest, max(0, count - 1 - len(mates)))]
        generator.shuffle(chosen)
        return [self._chunks[i] for i in chosen]

    def _questions(self, chosen: Sequence[tuple[str, str]], generator: random.Random) -> Iterator[Question]:
        """Yield questions in a mixed order: about one chunk, by rule, and about two."""
        about = [topics(text, self._seen)[:4] for _, text in chosen]
        one = [Question(generator.choice(ABOUT_ONE).format(topic), "") for each in about for topic in each]
        ruled = [each for name, text in chosen for each in questions(Passage(_title(name), text))]
        two = []
        for _ in range(self._most):
            a, b = generator.sample(range(len(about)), 2) if len(about) > 1 else (0, 0)
            pair = generator.choice(about[a]), generator.choice(about[b])
            two.append(Question(generator.choice(ABOUT_TWO).format(*pair), ""))
        if len(ruled) > 1:
            first, other = generator.sample(ruled, 2)
            two.append(Question(f"{first.question} And {other.question[0].lower()}{other.question[1:]}", ""))
            generator.shuffle(two)
        for questions_ in (one, ruled):
            generator.shuffle(questions_)
        while one or ruled or two:
            for questions_ in (one, ruled, two):
                if questions_:
                    yield questions_.pop()


def _title(name: str) -> str:
    """Return a document's title as its file's name says it."""
    return " ".join(word.capitalize() for word in Path(name).stem.replace("_", "-").split("-"))
