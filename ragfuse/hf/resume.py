"""Going on with an answer whose first tokens came from elsewhere: `generate` is made to choose them again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragfuse.hf.handover import Streamer


class ForcedTokens:
    """A logits processor that leaves nothing but given tokens to choose from, at the first steps of an answer.

    It must be the last processor, so that those before it see the model's own scores.

    Args:
        n_prompt: Tokens of the prompt.
        ids: The answer's first ids.
    """

    def __init__(self, n_prompt: int, ids: Sequence[int]) -> None:
        self._n_prompt, self._ids = n_prompt, tuple(ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [B, V] of the next step: unchanged once the given ids are there."""
        step = input_ids.shape[1] - self._n_prompt
        if step >= len(self._ids):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._ids[step]] = 0.0
        return forced


class ResumedStream:
    """A streamer that passes on what comes behind an answer's first `n` tokens, which were passed on before.

    Args:
        streamer: The streamer that has had the prompt and these tokens.
        n: How many tokens it has had.
    """

    def __init__(self, streamer: Streamer, n: int) -> None:
        self._streamer, self._n_left = streamer, n + 1  # the prompt comes first

    def put(self, value: Tensor) -> None:
        """Receive the prompt's ids first, then the ids of each step."""
        if self._n_left:
            self._n_left -= 1
            return
        self._streamer.put(value)

    def end(self) -> None:
        """End the stream."""
        self._streamer.end()
