"""Prompts that are too long for their model: an error with the numbers, or as many chunks left out as it takes.

Which chunks go first, and what goes with them, is told in `text.fit`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from ragfuse.engine.options import Ask, options_of, remaining_context
from ragfuse.errors import OverlongError
from ragfuse.hf.model import HFModel
from ragfuse.settings import Settings
from ragfuse.types.prompt import Prompt


def fitted(make: Callable[[int], Prompt], limit: int | None) -> Prompt:
    """The prompt without as few chunks as let it have `limit` tokens at most (None: any number), or without all.

    `make(n)` gives it without the last n of the chunks that may be left out, or without all where there are fewer. It
    may raise OverlongError for one that is much too long; where that is the shortest, so does this.
    """
    if limit is None:
        return make(0)
    without = lru_cache(maxsize=None)(make)
    if _fits(without, 0, limit):
        return without(0)
    least = make(sys.maxsize)
    if len(least) > limit:
        return least
    return without(1 + bisect_left(range(1, len(least.dropped)), True, key=lambda n: _fits(without, n, limit)))


def _fits(make: Callable[[int], Prompt], n: int, limit: int) -> bool:
    try:
        return len(make(n)) <= limit
    except OverlongError:
        return False


def room_of(prompt: Prompt, model: HFModel, drops: bool) -> int | None:
    """`remaining_context` a prompt; drops: its chunks might have been left out."""
    n_tokens, n_gone = prompt.segments[-1].stop, len(prompt.dropped)
    if n_gone:
        what = f"The prompt without the {n_gone} chunks that could be left out"
        return remaining_context(n_tokens, model, what, "Shorten the question, or what is said before.")
    so = "Take fewer or shorter chunks" + ("." if drops else ", or let the last ones be left out: overflow='drop'.")
    return remaining_context(n_tokens, model, so=so)


def drops(ask: Ask, settings: Settings) -> bool:
    """Whether chunks may be left out of a prompt that is too long."""
    return (ask.overflow or settings.overflow) == "drop"


def limit_of(ask: Ask, settings: Settings, model: HFModel) -> int | None:
    """Tokens that a prompt may have before chunks are left out of it; None where none ever is.

    Behind it is room for an answer as long as asked for, or of a quarter of what the model takes.
    """
    longest = model.max_context if drops(ask, settings) else None
    if longest is None:
        return None
    wanted = options_of(ask, settings).get("max_new_tokens") or settings.max_tokens
    return longest + 1 - min(wanted, max(1, longest // 4))
