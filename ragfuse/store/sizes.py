"""An entry's bytes by codec level as a line of text, as tiers' indexes store it: `raw=1234 cg2=99`, in its order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_LEVEL = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,31}")
_MAX_LEVELS = 16


def check_levels(levels: Sequence[str]) -> None:
    """Raise ValueError unless these can be an entry's levels: 1 to 16 different plain words."""
    plain = all(type(level) is str and _LEVEL.fullmatch(level) for level in levels)
    if not plain or not 0 < len(levels) == len(set(levels)) <= _MAX_LEVELS:
        raise ValueError(f"Wanted 1 to {_MAX_LEVELS} different names of levels, found {tuple(levels)!r:.200}.")


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Return sizes as one line of text."""
    return " ".join(f"{level}={nbytes}" for level, nbytes in sizes.items())


def parse_sizes(text: str, nbytes: int) -> dict[str, int]:
    """Parse the text of `format_sizes`.

    Args:
        text: The text.
        nbytes: Bytes of the whole entry, to which the sizes are completed as by `within`.

    Returns:
        Bytes by level.

    Raises:
        ValueError: The text is invalid, or the sizes add up to more than `nbytes`.
    """
    pairs = [pair.partition("=") for pair in text.split(" ")]
    check_levels([level for level, _, _ in pairs])
    if not all(size.isascii() and size.isdecimal() for _, _, size in pairs):
        raise ValueError(f"{text!r:.200} is not a list of sizes such as 'raw=1234 cg2=99'")
    return within({level: int(size) for level, _, size in pairs}, nbytes)


def within(sizes: Mapping[str, int], nbytes: int) -> dict[str, int]:
    """Return sizes that add up to `nbytes`: the first level also counts the entry's header and padding.

    Raises:
        ValueError: `nbytes` is less than the sum of the sizes.
    """
    first, rest = next(iter(sizes)), nbytes - sum(sizes.values())
    if rest < 0:
        raise ValueError(f"{nbytes} bytes are less than the sizes of its levels, {format_sizes(sizes)}")
    return {level: size + (rest if level == first else 0) for level, size in sizes.items()}
