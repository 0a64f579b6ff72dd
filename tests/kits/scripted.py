"""Answers that say what a test wants: a logits processor that leaves one token at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from ragfuse import Ask, Engine


class Script(LogitsProcessor):
    """Writes these ids, one after the other, whatever the model would write; behind them it is
    free.

    one `generate` alone may follow it.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.start = list(ids), -1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.start = input_ids.shape[1] if self.start < 0 else self.start
        at = input_ids.shape[1] - self.start
        if at >= len(self.ids):
            return scores
        only = torch.full_like(scores, float("-inf"))
        only[:, self.ids[at]] = 0.0
        return only


def spelled(engine: Engine, *parts: str | int) -> list[int]:
    """Ids of texts, special tokens in them as such, and of ids."""
    return [
        id
        for part in parts
        for id in ([part] if isinstance(part, int) else engine.tokens(part, special=True))
    ]


def saying(engine: Engine, *parts: str | int, ends: bool = True, **fields: Any) -> Ask:
    """An ask whose answer is this, and ends there."""
    end = engine.model.tokenizer.eos_token_id
    script = Script([*spelled(engine, *parts), *([end] if ends else [])])
    options = {**fields.pop("options", {}), "logits_processor": [script]}
    return Ask(**{"max_tokens": len(script.ids) + 4, **fields}, options=options)
