"""Cut a text into passages of at most so many tokens, at paragraphs, sentences or words, whichever come first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_UNIT = re.compile(r"[^\n.!?]*(?:[.!?]+[\s]*|\n+|$)")
UNIT_CHARS = 600
"""Most characters of a piece that stays whole; a longer sentence is cut at words."""
_WORD = re.compile(r"\s*\S{1,64}")


def passages(text: str, max_tokens: int, count: Callable[[str], int]) -> Iterator[str]:
    """Yield the passages of a text, without white space around them.

    Args:
        text: The text.
        max_tokens: Most tokens of a passage, counted sentence by sentence.
        count: Returns the number of tokens of a text.
    """
    found, n_tokens = "", 0
    for unit, n in (pair for each in _units(text) for pair in _counted(each, max_tokens, count)):
        ends_paragraph = found.endswith("\n\n") and n_tokens >= max_tokens // 2
        if found.strip() and (n_tokens + n > max_tokens or ends_paragraph):
            yield found.strip()
            found, n_tokens = "", 0
        found, n_tokens = found + unit, n_tokens + n
    if found.strip():
        yield found.strip()


def _counted(unit: str, max_tokens: int, count: Callable[[str], int]) -> Iterator[tuple[str, int]]:
    """Yield a unit with its number of tokens, halved as often as it has too many."""
    n = count(unit)
    if n <= max_tokens or len(unit) < 2:
        yield unit, n
        return
    half = unit.find(" ", len(unit) // 2)
    half = half if 0 < half < len(unit) - 1 else len(unit) // 2
    for part in (unit[:half], unit[half:]):
        yield from _counted(part, max_tokens, count)


def _units(text: str) -> Iterator[str]:
    """Yield sentences and lines, long ones in pieces of at most `UNIT_CHARS` characters."""
    for match in _UNIT.finditer(text.replace("\r\n", "\n").replace("\r", "\n")):
        unit = match.group()
        if len(unit) <= UNIT_CHARS:
            yield unit
            continue
        piece = ""
        for word in _WORD.finditer(unit):
            if len(piece) + len(word.group()) > UNIT_CHARS:
                yield piece
                piece = ""
            piece += word.group()
        yield piece
