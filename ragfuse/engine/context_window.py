"""How long a text can be for a model's window, before it is tokenised: a token stands for a few characters at most.

What passes here is counted exactly once it is tokenised (`overflow.room_of`).
"""

from __future__ import annotations

from ragfuse.errors import OverlongError
from ragfuse.hf.model import HFModel

TOKEN_CHARS = 128
"""Most characters that a token stands for, in the longest vocabularies: a run of spaces."""


def advice_for(may_drop: bool) -> str:
    """Return what to do about a prompt that is too long; `may_drop`: it has chunks that may be left out on request."""
    if not may_drop:
        return "Shorten it."
    return "Take fewer or shorter chunks, or leave out the last ones with overflow='drop'."


def may_fit(text: str, model: HFModel) -> bool:
    """Return False for a text that can never fit the model's context; True means that it may fit."""
    return model.max_context is None or len(text) // TOKEN_CHARS <= model.max_context


def named(n_left_out: int) -> str:
    """Return how an error message names a prompt that so many chunks were left out of."""
    return f"The prompt without the {n_left_out} chunks that could be left out" if n_left_out else "The prompt"


def check_text(text: str, model: HFModel, may_drop: bool, n_left_out: int) -> None:
    """Refuse the text of a prompt that can never fit the model's context.

    Args:
        text: The text.
        model: The model.
        may_drop: Whether it has chunks that may be left out on request.
        n_left_out: How many were left out of it.

    Raises:
        OverlongError: It can never fit.
    """
    if not may_fit(text, model):
        raise OverlongError(
            f"{named(n_left_out)} does not fit: {model.name} takes at most {model.max_context:,} tokens, found at "
            f"least {len(text) // TOKEN_CHARS:,} in {len(text):,} characters.",
            advice_for(may_drop),
            may_drop,
        )
