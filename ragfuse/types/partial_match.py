"""A partial match at the end of a growing text: a stop string or a marker of which only the first
letters are there.
"""

from __future__ import annotations

from collections.abc import Sequence


def partial_match(text: str, words: Sequence[str]) -> int:
    """Return how many characters at the end of a text could be the beginning of one of
    these words.
    """
    sizes = range(min(len(text), max(map(len, words), default=0) - 1), 0, -1)
    return next((size for size in sizes if any(word.startswith(text[-size:]) for word in words)), 0)
