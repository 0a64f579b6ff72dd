"""Questions made by rule over long prompts: a sentence to be found among many, and a trail through
several chunks.

`needle`: one sentence among the paragraphs of the demo's articles holds the answer, and others are
about other names. `tracing`: what is asked about passes through three chunks; each says one step,
and other trails pass beside it. A model that reads chunks apart has to put the steps together at
question time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from types import MappingProxyType

from ragfuse.calibration.case import Case
from ragfuse.errors import InputError

CASES = 60
"""Cases of a set."""
CHUNK_TOKENS = 256
"""Tokens of a chunk unless others are wanted."""
TRAILS = 3
"""Sentences of `needle`, or trails of `tracing`, in one prompt; one of them is asked about."""
FIRST_NAMES = (
    "Anna Boris Clara David Edith Felix Greta Hugo Ida Jonas Klara Leon Mira Nils Olga Peter"
)
LAST_NAMES = "Kern Lund Brandt Sommer Vogel Iversen Marsh Holt Weller Quist Ander Roth Tamm Ebner"
THINGS = "letter map ring ledger lantern compass violin medal chart key"

Rule = Callable[[random.Random], tuple[str, tuple[str, ...], list[str]]]
"""Makes one case: -> (question, its answers, sentences to hide, each in a chunk of its own)."""


def made_cases(
    name: str, paragraphs: Sequence[str], count: Callable[[str], int], context_tokens: int
) -> list[Case]:
    """Return the cases of a set made by rule; the same each time.

    Args:
        name: "needle" or "tracing".
        paragraphs: What the sentences are hidden in.
        count: Tokens of a text.
        context_tokens: Tokens of all chunks of a prompt, roughly.

    Raises:
        InputError: Fewer tokens are wanted than the sentences need chunks for, or more than there
            are paragraphs for.
    """
    sizes = {text: count(text) for text in paragraphs}
    least = 3 * TRAILS * max(sizes.values())
    if not least <= context_tokens <= sum(sizes.values()):
        raise InputError(
            f"Wanted prompts of {least:,} to {sum(sizes.values()):,} tokens for '{name}', found"
            f" {context_tokens:,}. Change --context-tokens."
        )
    cases = []
    for number in range(CASES):
        drawn = random.Random(f"{name} {number}")
        question, answers, sentences = RULES[name](drawn)
        chosen, total = list[str](), 0
        for text in drawn.sample(list(sizes), len(sizes)):
            if total >= context_tokens:
                break
            chosen.append(text)
            total += sizes[text]
        for place, sentence in zip(
            drawn.sample(range(len(chosen)), len(sentences)), sentences, strict=True
        ):
            chosen[place] = hidden(chosen[place], sentence, drawn)
        cases.append(Case(name, str(number), question, answers, tuple(chosen)))
    return cases


def hidden(paragraph: str, sentence: str, drawn: random.Random) -> str:
    """Return the paragraph with the sentence between two of its own, or behind them."""
    ends = [found.end() for found in re.finditer(r"[.!?] (?=[A-Z])", paragraph)]
    if not ends:
        return f"{paragraph} {sentence}"
    place = drawn.choice(ends)
    return f"{paragraph[:place]}{sentence} {paragraph[place:]}"


def _names(drawn: random.Random, count: int) -> list[str]:
    """Return different full names, no two with the same first or last name."""
    firsts, lasts = (
        drawn.sample(FIRST_NAMES.split(), count),
        drawn.sample(LAST_NAMES.split(), count),
    )
    return [f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)]


def _needle(drawn: random.Random) -> tuple[str, tuple[str, ...], list[str]]:
    names, numbers = _names(drawn, TRAILS), drawn.sample(range(10_000, 100_000), TRAILS)
    sentences = [
        f"The register number of {name} is {number}."
        for name, number in zip(names, numbers, strict=True)
    ]
    return f"What is the register number of {names[0]}?", (str(numbers[0]),), sentences


def _tracing(drawn: random.Random) -> tuple[str, tuple[str, ...], list[str]]:
    names, rooms = _names(drawn, 3 * TRAILS), drawn.sample(range(100, 1000), TRAILS)
    things, sentences = drawn.sample(THINGS.split(), TRAILS), list[str]()
    for trail in range(TRAILS):
        owner, friend, keeper = names[3 * trail : 3 * trail + 3]
        sentences += [
            f"{owner} gave the {things[trail]} to {friend}.",
            f"{friend} handed on everything from {owner.split()[0]} to {keeper}.",
            f"{keeper} keeps such things in room {rooms[trail]}.",
        ]
    answers = str(rooms[0]), f"room {rooms[0]}"
    return f"In which room is the {things[0]} that {names[0]} gave away?", answers, sentences


RULES: MappingProxyType[str, Rule] = MappingProxyType({"needle": _needle, "tracing": _tracing})
"""The sets by name."""
