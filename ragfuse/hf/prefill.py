"""A prompt whose KV is ready, and sources of cached runs that are at hand, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ragfuse.errors import RefusedError
from ragfuse.hf.cache import RowCache
from ragfuse.types.kv import ChunkKV, LayerKV


@dataclass(frozen=True)
class Prefill:
    """A prompt whose KV is ready: ids, cache of all T rows, logits [V] of the last, and what was computed.

    cache: None where a refused model's state is no KV per token. positions: int64 [T], None for 0..T-1. chosen: int64,
    rows on offer that were recomputed in the check layer; mean_ratio: their share per layer. state: in place of a cache
    and logits, which are empty then, the model's own cache behind all ids but the last; n_before: of these, the ones
    that were computed for an earlier prompt.
    """

    token_ids: tuple[int, ...]
    cache: RowCache | None
    logits: Tensor
    positions: Tensor | None = None
    chosen: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    mean_ratio: float = 0.0
    state: Any = field(default=None, repr=False)
    n_before: int = 0

    @property
    def kv(self) -> ChunkKV:
        """The KV of all T rows, as views where it stands in one; RefusedError where there is none."""
        if self.cache is None:
            raise RefusedError("This model's state is not KV per token.")
        whole = (layer.whole() for layer in self.cache.layers)
        return ChunkKV(tuple(LayerKV(keys[0], values[0]) for keys, values in whole))

    def rows(self, lo: int, hi: int) -> ChunkKV:
        """The KV of rows lo:hi, also of rows behind the prompt's; RefusedError where there is none."""
        if self.cache is None:
            raise RefusedError("This model's state is not KV per token.")
        rows = (layer.rows(lo, hi) for layer in self.cache.layers)
        return ChunkKV(tuple(LayerKV(keys[0], values[0]) for keys, values in rows))

    def copy(self) -> Prefill:
        """The same with a cache of its own, for one of two continuations."""
        if self.cache is None:
            return self
        cache = RowCache(len(self.cache.layers))
        for mine, theirs in zip(cache.layers, self.cache.layers, strict=True):
            keys, values = theirs.whole()
            mine.fill(keys.clone(), values.clone(), theirs.length)
        return replace(self, cache=cache)


class NoSource:
    """The source of a prompt without cached runs."""

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class KVSource:
    """Runs whose KV is at hand, by segment number."""

    chunks: Sequence[ChunkKV]

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """That layer of every chunk."""
        return {index: chunk.layers[layer] for index, chunk in enumerate(self.chunks)}
