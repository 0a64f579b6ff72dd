"""Reading on from the KV of a context: the paper's `generate_with_kv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragfuse.engine.request import ends_of
from ragfuse.hf.cache import RowCache
from ragfuse.hf.model import HFModel
from ragfuse.types.kv import ChunkKV


@dataclass(frozen=True)
class Said:
    """An answer's ids; logits float32 [n + 1, V] along the guess of n ids, or along the answer, and
    behind it.
    """

    token_ids: tuple[int, ...]
    along: Tensor


class Continued:
    """A model over a context's KV: what it says next, as often as asked."""

    def __init__(self, model: HFModel, kv: ChunkKV) -> None:
        self.model, self.n_tokens = model, kv.n_tokens
        self.cache = RowCache(len(kv.layers))
        for layer, rows in zip(self.cache.layers, kv.layers, strict=True):
            keys, values = (
                part.to(model.device)[None].contiguous() for part in (rows.keys, rows.values)
            )
            layer.fill(keys, values, kv.n_tokens)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits float32 [n, V] behind each of n ids that follow the context."""
        self.cache.length = self.n_tokens
        return self._behind(token_ids)

    def answer(self, token_ids: Sequence[int], most: int, guess: Sequence[int] = ()) -> Said:
        """The greedy answer to the asked ids, the end token left out; a guess at it is read in one
        pass.
        """
        said, ends, asked = list[int](), ends_of(self.model), len(token_ids)
        along = [*self.logits([*token_ids, *guess])[asked - 1 :]]
        token, is_guessed = int(along[0].argmax()), bool(guess)
        while token not in ends and len(said) < most:
            said.append(token)
            is_guessed = is_guessed and tuple(guess[: len(said)]) == tuple(said)
            if is_guessed:
                token = int(along[len(said)].argmax())
                continue
            self.cache.length = self.n_tokens + asked + len(said) - 1
            behind = self._behind([token])[-1]
            along += [] if guess else [behind]
            token = int(behind.argmax())
        return Said(tuple(said), torch.stack(along))

    def _behind(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        with self.model.lock, torch.no_grad():
            out = self.model.model(input_ids=ids, past_key_values=self.cache, use_cache=True)
        logits: Tensor = out.logits[0].float()
        return logits
