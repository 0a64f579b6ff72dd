"""OpenAI's penalties and biases as a logits processor; transformers' own count the prompt, too."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Makes tokens likelier or less likely by what one `generate` has written so far.

    A token's logit loses `presence` if it was written, and `frequency` for each time that it was; it gains its `bias`.
    The prompt does not count.
    """

    def __init__(self, presence: float = 0.0, frequency: float = 0.0, bias: Mapping[int, float] | None = None) -> None:
        self._presence, self._frequency = presence, frequency
        ids = list(bias or {})
        self._biased = torch.tensor(ids, dtype=torch.int64)
        self._bias = torch.tensor([(bias or {})[id] for id in ids], dtype=torch.float32)
        self._from: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: [B, V], of the next token; input_ids: int64 [B, T], the prompt and what was written behind it."""
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
