"""Prompts that are too long for the model: raise an error with the numbers, or leave out chunks
until they fit.

A text that can never fit is refused before it is tokenised, as a token stands for a few characters
at most. `text.chat_messages` decides which chunks are left out first.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from ragfuse.errors import OverlongError
from ragfuse.hf.model import HFModel
from ragfuse.types.prompt import Prompt

TOKEN_CHARS = 128
"""Most characters that a token stands for, in the longest vocabularies: a run of spaces."""


def remaining_context(
    n_tokens: int,
    model: HFModel,
    what: str = "The prompt",
    advice: str = "Shorten it.",
    may_drop: bool = False,
    at_least: bool = False,
) -> int | None:
    """Return how many new tokens fit after a prompt of `n_tokens`; None where the model has no
    limit.

    Args:
        n_tokens: Tokens of the prompt.
        model: The model.
        what: How an error message names the prompt.
        advice: The last sentence of the error message.
        may_drop: Whether chunks may be left out on request; then that is the advice.
        at_least: Whether the prompt has more tokens than that.

    Raises:
        OverlongError: The prompt itself does not fit.
    """
    max_tokens = model.max_context
    if max_tokens is None:
        return None
    if may_drop:
        advice = "Take fewer or shorter chunks, or leave out the last ones with overflow='drop'."
    if n_tokens > max_tokens:
        raise OverlongError(
            f"{what} does not fit: {model.name} takes at most {max_tokens:,} tokens, found "
            f"{'at least ' if at_least else ''}{n_tokens:,}.",
            advice,
            may_drop,
        )
    return max_tokens - n_tokens + 1


def may_fit(text: str, model: HFModel) -> bool:
    """Return False for a text that can never fit the model's context; True means that it
    may fit.
    """
    return model.max_context is None or len(text) // TOKEN_CHARS <= model.max_context


def fitted(make: Callable[[int], Prompt], limit: int | None) -> Prompt:
    """Return the prompt with as few chunks left out as needed to have at most `limit` tokens.

    Args:
        make: `make(n)` builds the prompt without the last n of the chunks that may be left out
            (all, if there are fewer).
        limit: Most tokens; None: any number.

    Returns:
        The prompt; without all those chunks where even that is too long.
    """
    without = lru_cache(maxsize=None)(make)
    if limit is None or len(without(0)) <= limit:
        return without(0)
    shortest = make(sys.maxsize)
    if len(shortest) > limit:
        return shortest
    fewer = range(1, len(shortest.dropped))
    return without(1 + bisect_left(fewer, True, key=lambda n: len(without(n)) <= limit))
