"""Time to the first token against the prompt's length, all of it computed and nearly all of it
cached.

Computing grows faster than the prompt; placing modules grows with it (Prompt Cache 5.4, figure 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

from ragfuse_bench.modules.asked import registered, timed
from ragfuse_bench.modules.cases import long_schema, over_all
from ragfuse_bench.quality.cases import Packing, read_cases
from ragfuse_bench.rounds import Runner

from ragfuse.engine.engine import Engine
from ragfuse.errors import InputError
from ragfuse.types.keys import digest

MODULE_TOKENS = 256
QUESTION = "Which of these notes is the oldest?"


def slope(engine: Engine, runner: Runner, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """A row for a prompt of each length, about; InputError where it does not fit the model."""
    rows = []
    for length in lengths:
        texts = notes(engine, length)
        schema = long_schema(f"notes-{length}", texts)
        with registered(engine, schema):
            rows.append(
                timed(engine, over_all(schema, len(texts), QUESTION), runner, f"{length:,} tokens")
            )
    return rows


def notes(engine: Engine, tokens: int) -> list[str]:
    """Texts of about `MODULE_TOKENS` each, from the questions that come along, of `tokens` tokens
    in all, about.
    """
    found, held, left = list[str](), "", tokens
    for text in _paragraphs(engine):
        held = f"{held} {text}".strip()
        size = len(engine.tokens(held))
        if size >= left:
            words = held.split(" ")
            return [*found, " ".join(words[: ceil(len(words) * left / size)])]
        if size >= MODULE_TOKENS:
            found.append(held)
            held, left = "", left - size
    raise InputError(
        f"Wanted text of {tokens:,} tokens, found {tokens - left:,}: take shorter prompts."
    )


def _paragraphs(engine: Engine) -> Iterator[str]:
    """Each paragraph once, however many questions are about it."""
    seen = set[str]()
    for case in read_cases("held-out", Packing(lambda text: len(engine.tokens(text)))):
        for text in case.chunks:
            if (name := digest(text)) not in seen:
                seen.add(name)
                yield text
