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

from ragfuse.engine.ask import NO_LIMIT, Ask
from ragfuse.errors import OverlongError
from ragfuse.hf.model import HFModel
from ragfuse.settings import Settings
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


def asked_length(ask: Ask, room: int | None = None) -> int | None:
    """Return the most tokens that the question itself gives its answer; None where it does not say.

    Args:
        ask: The question's options.
        room: What an answer without a limit gets.
    """
    asked = ask.options.get("max_new_tokens") or ask.max_tokens
    return room if asked == NO_LIMIT else asked


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


def check_fits(prompt: Prompt, ask: Ask, model: HFModel, drops: bool, may_shorten: bool) -> None:
    """Refuse a prompt, or an answer that was asked to be longer than the model's context has room
    for behind it.

    Without a length in the request an answer gets what is left.

    Args:
        prompt: The prompt.
        ask: The question's options.
        model: The model.
        drops: Whether chunks are left out where it is too long; else that is the advice.
        may_shorten: Whether the prompt may be shortened for the answer; then its length alone
            counts.

    Raises:
        OverlongError: One of them does not fit.
    """
    n_tokens = prompt.segments[-1].stop
    may_drop = not drops and any(segment.kind == "chunk" for segment in prompt.segments)
    left = remaining_context(n_tokens, model, may_drop=may_drop)
    wanted, max_context = asked_length(ask), model.max_context
    room = max_context if may_shorten else left
    if wanted is not None and room is not None and wanted > room:
        behind = "" if may_shorten else f" behind a prompt of {n_tokens:,}"
        raise OverlongError(
            f"An answer of {wanted:,} tokens does not fit{behind}: {model.name} reads at most"
            f" {max_context:,} tokens, all of the prompt and all but the last of the answer.",
            f"Ask for at most {room:,} tokens{'' if may_shorten else ', or shorten the prompt'}.",
            argument="max_tokens",
        )


def drops(ask: Ask, settings: Settings) -> bool:
    """Return whether chunks may be left out of a prompt that is too long."""
    return (ask.overflow or settings.overflow) == "drop"


def limit_of(ask: Ask, settings: Settings, window: int) -> int:
    """Return the most tokens of a prompt that is shortened to fit into so many with its answer.

    It leaves room for an answer of the requested length, but at most for a quarter of the window.
    """
    return window - min(asked_length(ask) or settings.max_tokens, max(1, window // 4))
