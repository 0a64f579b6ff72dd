"""Bytes of an entry by codec level, as the indexes of tiers write them down: `raw=1234 cg2=99`, in the entry's order.

Names and numbers only: `codec` says which levels there are, and what they are good for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_LEVEL = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,31}")
_MOST = 16


def check_levels(levels: Sequence[str]) -> None:
    """ValueError if these are not the names of an entry's levels: some plain words, each once."""
    plain = all(type(level) is str and _LEVEL.fullmatch(level) for level in levels)
    if not plain or not 0 < len(levels) == len(set(levels)) <= _MOST:
        raise ValueError(f"Levels {tuple(levels)!r:.200} are not some plain words, each once.")


def said(sizes: Mapping[str, int]) -> str:
    """Sizes in one line of text."""
    return " ".join(f"{level}={nbytes}" for level, nbytes in sizes.items())


def understood(text: str, nbytes: int) -> dict[str, int]:
    """What `said` says of an entry that takes `nbytes` in all; ValueError if it says no such thing."""
    pairs = [pair.partition("=") for pair in text.split(" ")]
    check_levels([level for level, _, _ in pairs])
    if not all(size.isascii() and size.isdecimal() for _, _, size in pairs):
        raise ValueError(f"{text!r:.200} tells no sizes")
    return within({level: int(size) for level, _, size in pairs}, nbytes)


def within(sizes: Mapping[str, int], nbytes: int) -> dict[str, int]:
    """Sizes whose sum is all that an entry takes: the first level has what is said of the entry beside its own bytes.

    ValueError where that is less than they are.
    """
    first, rest = next(iter(sizes)), nbytes - sum(sizes.values())
    if rest < 0:
        raise ValueError(f"{nbytes} bytes cannot hold {said(sizes)}")
    return {level: size + (rest if level == first else 0) for level, size in sizes.items()}
