"""Time to the first token against the prompt's length, all of it computed and nearly all of it cached.

Computing grows faster than the prompt; placing modules grows with it (Prompt Cache 5.4, figure 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log
from typing import Any

from ragfuse_bench.modules.asked import registered, timed
from ragfuse_bench.modules.cases import long_schema, over_all
from ragfuse_bench.quality.cases import Packing, read_cases

from ragfuse.calibration.runner import Runner
from ragfuse.engine.engine import Ask, Engine
from ragfuse.errors import InputError
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.types.keys import digest

MODULE_TOKENS = 256
LONG, MOSTLY = 2048, 0.95
"""Tokens and cached share of the prompt on which the cache's worth is told in one number."""
QUESTION = "Which of these notes is the oldest?"


def slope(engine: Engine, runner: Runner, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """A row for a prompt of each length, about; InputError where it does not fit the model."""
    rows = []
    for length in lengths:
        texts = notes(engine, length)
        schema = long_schema(f"notes-{length}", texts)
        with registered(engine, schema):
            rows.append(timed(engine, over_all(schema, len(texts), QUESTION), runner, f"{length:,} tokens"))
    return rows


def notes(engine: Engine, tokens: int) -> list[str]:
    """Texts of about `MODULE_TOKENS` each, from the questions that come along, of `tokens` tokens in all, about."""
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
    raise InputError(f"Wanted text of {tokens:,} tokens, found {tokens - left:,}: take shorter prompts.")


def _paragraphs(engine: Engine) -> Iterator[str]:
    """Each paragraph once, however many questions are about it."""
    seen = set[str]()
    for case in read_cases("held-out", Packing(lambda text: len(engine.tokens(text)))):
        for text in case.chunks:
            if (name := digest(text)) not in seen:
                seen.add(name)
                yield text


def mostly_cached(engine: Engine, runner: Runner) -> dict[str, Any]:
    """A row for a prompt over `LONG` tokens of modules, and new text for as long as `MOSTLY` of all is cached."""
    texts = notes(engine, LONG)
    schema, words = long_schema("notes", texts), texts[0].split(" ")
    said = (f"{' '.join(words[:count])}\n\n{QUESTION}" for count in range(len(words), 0, -1))
    requests = (over_all(schema, len(texts), text) for text in said)
    with registered(engine, schema):
        request = next(request for request in requests if cached_share(engine, request) >= MOSTLY)
        return timed(engine, request, runner, f"{MOSTLY:.0%} of {LONG:,} tokens")


def cached_share(engine: Engine, request: PMLPrompt) -> float:
    """The share of a prompt's tokens that lie in modules."""
    prompt = engine.schemas.prompt(request, Ask())
    return sum(len(segment.tokens) for segment in prompt.segments if segment.keys) / len(prompt)


def growth(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The exponent k of seconds ~ tokens^k, by least squares of their logarithms; None of fewer than two lengths.

    1: linear, 2: quadratic.
    """
    points = [(log(row["tokens"]), log(row[key])) for row in rows]
    if len({x for x, _ in points}) < 2:
        return None
    mx, my = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) * (x - mx) for x, _ in points)
