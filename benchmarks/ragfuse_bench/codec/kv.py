"""The KV of a context: computed once, kept if wished, and read on from.

The paper's `calculate_kv` is `Bank.kv`, its `generate_with_kv` is what `Continued` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragfuse.engine.options import ends_of
from ragfuse.hf.cache import RowCache
from ragfuse.hf.model import HFModel
from ragfuse.types.keys import token_digest
from ragfuse.types.kv import ChunkKV, LayerKV


@dataclass(frozen=True)
class Bank:
    """The raw KV of contexts by one model; in files of a folder between runs, unless that is None."""

    model: HFModel
    folder: Path | None = None

    def kv(self, token_ids: Sequence[int]) -> ChunkKV:
        """KV of a run at positions 0..n-1, every layer exactly as the model computed it."""
        if self.folder is None:
            return self.model.encode(token_ids)
        path = self.folder / f"{self.model.fingerprint[:16]}-{token_digest(token_ids)}.safetensors"
        if not path.exists():
            self._keep(path, self.model.encode(token_ids))
        tensors = load_file(path)
        return ChunkKV(tuple(LayerKV(tensors[f"k{i}"], tensors[f"v{i}"]) for i in range(self.model.n_layers)))

    def _keep(self, path: Path, kv: ChunkKV) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        layers = {f"k{i}": layer.keys for i, layer in enumerate(kv.layers)}
        layers |= {f"v{i}": layer.values for i, layer in enumerate(kv.layers)}
        save_file({name: tensor.contiguous() for name, tensor in layers.items()}, partial)
        partial.replace(path)


@dataclass(frozen=True)
class Said:
    """An answer's ids; logits float32 [n + 1, V] along the guess of n ids, or along the answer, and behind it."""

    token_ids: tuple[int, ...]
    along: Tensor


class Continued:
    """A model over a context's KV: what it says next, as often as asked."""

    def __init__(self, model: HFModel, kv: ChunkKV) -> None:
        self.model, self.n_tokens = model, kv.n_tokens
        self.cache = RowCache(len(kv.layers))
        for layer, rows in zip(self.cache.layers, kv.layers, strict=True):
            keys, values = (part.to(model.device)[None].contiguous() for part in (rows.keys, rows.values))
            layer.fill(keys, values, kv.n_tokens)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits float32 [n, V] behind each of n ids that follow the context."""
        self.cache.length = self.n_tokens
        return self._behind(token_ids)

    def answer(self, token_ids: Sequence[int], most: int, guess: Sequence[int] = ()) -> Said:
        """The greedy answer to the asked ids, the end token left out; a guess at it is read in one pass."""
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
