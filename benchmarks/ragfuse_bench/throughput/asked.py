"""Questions in other words, by rules, and the passages that each is asked over, in a random order.

The paper has 1,500 wordings of its questions written by a large model; here rules reword them, so
that a question comes back often and never means anything else. Nothing is asked here.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from ragfuse.calibration.case import Case

TOP = 6
"""Passages of a prompt."""
SAME = (
    (r"^In what year\b", "In which year"),
    (r"^In which year\b", "In what year"),
    (r"^What is\b", "What's"),
    (r"^Who is\b", "Who's"),
    (r"^How many\b", "What number of"),
    (r"^Which\b", "What"),
    (r"^Where is\b", "In what place is"),
    (r"^When (was|were|did)\b", r"At what time \1"),
    (r"\bfilm\b", "movie"),
    (r"\bstarted\b", "began"),
    (r"\bbegan\b", "started"),
)
"""What may stand in place of what, without another meaning."""
FRAMES = (
    "{asked}",
    "Tell me: {asked}",
    "{asked} Answer in a few words.",
    "According to the passages, {lower}",
    "I would like to know this: {asked}",
    "Please answer from the passages. {asked}",
)


@dataclass(frozen=True)
class Request:
    """A question in some wording, and the texts that were retrieved for it, in the prompt's
    order.
    """

    question: str
    chunks: tuple[str, ...]


def wordings(question: str) -> tuple[str, ...]:
    """A question in other words, itself first; never twice the same."""
    plain = question.strip()
    said = [plain, *(re.sub(rule, other, plain, count=1) for rule, other in SAME)]
    asked = [text if text.endswith("?") else f"{text.rstrip('.')}?" for text in said]
    framed = [
        frame.format(asked=text, lower=_lower(text))
        for frame in FRAMES
        for text in dict.fromkeys(asked)
    ]
    return tuple(dict.fromkeys(framed))


def top(question: str, passages: Sequence[str], count: int = TOP) -> list[str]:
    """The passages that share the rarest words with a question, the best first; of equal ones the
    first.
    """
    words = [set(_words(passage)) for passage in passages]
    known = Counter(word for each in words for word in each)
    asked = sorted(set(_words(question)))

    def score(at: int) -> float:
        return sum(log(1 + len(passages) / known[word]) for word in asked if word in words[at])

    return [passages[at] for at in sorted(range(len(passages)), key=lambda at: -score(at))[:count]]


def drawn(cases: Sequence[Case], count: int, seed: int) -> list[Request]:
    """So many requests: a case, a wording and an order of its passages are drawn for each."""
    chance = random.Random(seed)
    return [_request(chance.choice(cases), chance) for _ in range(count)]


def each_once(cases: Sequence[Case], seed: int) -> list[Request]:
    """Every case once, in some wording and order."""
    chance = random.Random(seed)
    return [_request(case, chance) for case in cases]


def _request(case: Case, chance: random.Random) -> Request:
    question = chance.choice(wordings(case.question))
    chunks = top(question, case.chunks)
    chance.shuffle(chunks)
    return Request(question, tuple(chunks))


def _lower(text: str) -> str:
    """With a small letter in front, unless the first word looks like a name."""
    first = text.split(" ")[0].rstrip("'s")
    return text[:1].lower() + text[1:] if first in _OPENERS else text


_OPENERS = frozenset(
    (
        "What",
        "Which",
        "Who",
        "Whose",
        "Where",
        "When",
        "Why",
        "How",
        "In",
        "At",
        "Is",
        "Are",
        "Was",
        "Did",
    )
)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
