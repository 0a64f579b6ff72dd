"""Training examples for the reader: passages in random order and number, and several questions
about them.

The articles of SQuAD are split: the three with the fewest answerable questions are held out,
passages and all. The rest, with rule-made questions over Wikipedia passages beside them, is what
`Examples` draws from.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfuse.adapt.examples import TEMPLATES, Template
from training.rules import Passage, Question, questions, tidy

HELD_OUT = 3
"""Articles kept from training: those with the fewest answerable questions."""


@dataclass(frozen=True)
class Source:
    """A passage and all that can be asked about it."""

    passage: Passage
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class AnsweredExample:
    """One context and several questions whose answers are known."""

    template: Template
    passages: tuple[str, ...]
    questions: tuple[Question, ...]


def squad(path: Path) -> dict[str, list[Source]]:
    """Article -> its paragraphs with their answerable questions, of a SQuAD file (.json or
    .json.gz).
    """
    articles: dict[str, list[Source]] = {}
    for article in json.loads(_read(path))["data"]:
        title = article["title"].replace("_", " ")
        articles[title] = [
            Source(Passage(title, paragraph["context"].strip()), tuple(_asked(paragraph["qas"])))
            for paragraph in article["paragraphs"]
        ]
    return articles


def _asked(qas: Sequence[dict[str, Any]]) -> Iterator[Question]:
    for qa in qas:
        golds = Counter(answer["text"] for answer in qa["answers"])
        if golds and not qa.get("is_impossible"):
            most = max(golds.values())
            yield Question(
                qa["question"].strip(),
                min((text for text, n in golds.items() if n == most), key=len),
            )


def split(
    articles: dict[str, list[Source]],
) -> tuple[dict[str, list[Source]], dict[str, list[Source]]]:
    """(for training, held out)."""
    by_size = sorted(
        articles, key=lambda title: sum(len(source.questions) for source in articles[title])
    )
    held = set(by_size[:HELD_OUT])
    train = {title: sources for title, sources in articles.items() if title not in held}
    return train, {title: articles[title] for title in articles if title in held}


def wikipedia(path: Path) -> list[Source]:
    """Passages of a JSONL file of {title, text}, with the questions that rules make of them."""
    sources = []
    for line in _read(path).splitlines():
        said = json.loads(line)
        passage = Passage(said["title"], tidy(said["text"]))
        sources.append(Source(passage, tuple(questions(passage))))
    return [source for source in sources if source.questions]


def _read(path: Path) -> str:
    return (gzip.open(path, "rt") if path.suffix == ".gz" else path.open()).read()


class Examples:
    """Draws examples for ever: 1 to 8 passages, sometimes of several paragraphs, up to `max_words`
    in all.
    """

    def __init__(
        self,
        train: dict[str, list[Source]],
        wiki: Sequence[Source],
        seed: int | str,
        max_words: int = 1900,
    ) -> None:
        self.articles, self.wiki, self.max_words = [s for s in train.values() if s], wiki, max_words
        self.random = random.Random(seed)
        self.all = [source for sources in self.articles for source in sources]
        self.rest: list[Source] = []

    def draw(self, most: int) -> AnsweredExample:
        """An example with up to `most` questions."""
        rnd = self.random
        n = rnd.choice((1, 2, 3, 4, 5, 6, 6, 6, 7, 8))
        kind = rnd.random()
        if kind < 0.2:
            sources = rnd.sample(self.wiki, n)
        elif kind < 0.6:
            article = rnd.choice(self.articles)
            sources = [self._next(), *rnd.sample(article, min(n - 1, len(article)))]
        else:
            sources = [self._next(), *rnd.sample(self.all, n - 1)]
        if 0.35 < kind < 0.5:
            sources += rnd.sample(self.wiki, rnd.randint(1, 3))
        passages = list(dict.fromkeys(sources))
        while (
            sum(len(s.passage.text.split()) for s in passages) > self.max_words
            and len(passages) > 1
        ):
            passages.pop()
        asked = self._ask(passages, most)
        rnd.shuffle(passages)
        template = rnd.choice(TEMPLATES)
        texts = [
            template.passage.format(title=s.passage.title, text=s.passage.text) for s in passages
        ]
        return AnsweredExample(template, tuple(self._grouped(texts)), tuple(asked))

    def _next(self) -> Source:
        """SQuAD's paragraphs in turn, so that all are asked about equally often."""
        if not self.rest:
            self.rest = [source for source in self.all if source.questions]
            self.random.shuffle(self.rest)
        return self.rest.pop()

    def _ask(self, sources: Sequence[Source], most: int) -> list[Question]:
        """The first passage's questions before the others'; few that rules made of one passage; no
        blanks twice.
        """
        first, *others = [list(source.questions) for source in sources]
        rest = [
            question
            for questions in others
            for question in self.random.sample(questions, min(4, len(questions)))
        ]
        self.random.shuffle(rest)
        self.random.shuffle(first)
        kept, blanks = [], 0
        for question in [*first[:5], *rest]:
            blank = "____" in question.question
            blanks += blank
            if not blank or blanks <= 1:
                kept.append(question)
        return kept[:most]

    def _grouped(self, texts: list[str]) -> Iterator[str]:
        """Sometimes two or three passages are one chunk."""
        if self.random.random() < 0.8:
            yield from texts
            return
        while texts:
            size = self.random.randint(1, 3)
            yield "\n\n".join(texts[:size])
            texts = texts[size:]
