"""OpenAI's penalties and logit biases as a logits processor; those of transformers also count the prompt."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Changes logits by the tokens that one `generate` call has written so far; the prompt does not count.

    Args:
        presence: Subtracted from the logit of every token that was written.
        frequency: Subtracted for each time that the token was written.
        bias: Added to the logits of these token ids.
    """

    def __init__(self, presence: float = 0.0, frequency: float = 0.0, bias: Mapping[int, float] | None = None) -> None:
        self._presence, self._frequency = presence, frequency
        ids = list(bias or {})
        self._biased = torch.tensor(ids, dtype=torch.int64)
        self._bias = torch.tensor([(bias or {})[id] for id in ids], dtype=torch.float32)
        self._from: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed scores [B, V] of the next token; input_ids: int64 [B, T], the prompt and the answer."""
        if self._from is None:
            self._from = input_ids.shape[1]
        scores = scores.clone()
        if len(self._biased):
            at, bias = self._biased.to(scores.device), self._bias.to(scores.device, scores.dtype)
            scores[:, at] += bias
        written = input_ids[:, self._from :]
        if written.shape[1] and (self._presence or self._frequency):
            counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
            scores -= self._frequency * counts + self._presence * (counts > 0)
        return scores
