"""OpenAI's penalties as a logits processor; those of transformers also count the prompt."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Changes logits by the tokens that one `generate` call has written so far; the prompt does not
    count.

    Args:
        presence: Subtracted from the logit of every token that was written.
        frequency: Subtracted for each time that the token was written.
    """

    def __init__(self, presence: float = 0.0, frequency: float = 0.0) -> None:
        self._presence, self._frequency = presence, frequency
        self._from: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed scores [B, V] of the next token; input_ids: int64 [B, T], the prompt
        and the answer.
        """
        if self._from is None:
            self._from = input_ids.shape[1]
        written = input_ids[:, self._from :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, written, torch.ones_like(written, dtype=scores.dtype)
        )
        return scores - self._frequency * counts - self._presence * (counts > 0)
