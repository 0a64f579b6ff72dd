"""The result of a prefill, and the parts of a prompt whose KV is already in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragfuse.errors import RefusedError
from ragfuse.hf.cache import RowCache
from ragfuse.hf.probe import logits_error, relative, typical
from ragfuse.types.kv import ChunkKV, Layer, LayerKV

NO_NUMBER = 1e9
"""Error reported for an infinite or NaN result."""


@dataclass(frozen=True)
class Prefill:
    """A prefilled prompt, ready for `generate`.

    Args:
        token_ids: The T tokens of the prompt.
        cache: KV of all T rows. None if the model's state is not KV per token.
        logits: [V], the logits of the last row.
        positions: int64 [T], the position of each token. None means 0..T-1.
        chosen: int64, the candidate rows that were recomputed at `Policy.check_layer`.
        mean_ratio: Share of candidate rows recomputed, averaged over all layers from
            `Policy.check_layer` on.
        state: For a model without KV per token: the model's own cache after all tokens but the
            last. `cache` is then None, and `logits` is empty.
        n_before: Number of tokens in `state` that were reused from an earlier prompt.
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
        """KV of all rows in the cache, which may include rows of the answer. Raises RefusedError
        for a model without KV per token.
        """
        if self.cache is None:
            raise RefusedError(
                "This model keeps no KV per token (it may be recurrent), so no KV can be returned."
            )
        layers = (layer.whole() for layer in self.cache.layers)
        return ChunkKV(tuple(LayerKV(keys[0], values[0]) for keys, values in layers))

    def error(
        self,
        wanted: Prefill,
        routed: bool = False,
        rows: Tensor | slice | None = None,
        layers: slice = slice(None),
    ) -> float:
        """Return the largest relative error found in the logits and in any layer's keys and values.

        Args:
            wanted: The reference prefill.
            routed: True if rounding may route tokens to other experts (`hf.probe.is_routed`). Each
                layer's error is then the median over the layer's rows, and logits are ignored.
            rows: The rows to compare; logits are then ignored. None means all rows and the logits.
            layers: The layers to compare.
        """
        by_row, errors = typical if routed else relative, list[float]()
        if not routed and rows is None:
            errors.append(logits_error(self.logits, wanted.logits))
        chosen = slice(None) if rows is None else rows
        for a, b in zip(self.kv.layers[layers], wanted.kv.layers[layers], strict=True):
            errors.append(by_row(a.keys[:, chosen], b.keys[:, chosen]))
            errors.append(by_row(a.values[:, chosen], b.values[:, chosen]))
        return max(error if math.isfinite(error) else NO_NUMBER for error in errors)

    def rewind(self) -> None:
        """Drop the rows of an answer, so that the prompt can be continued again."""
        if self.cache is not None:
            self.cache.length = len(self.token_ids)


@dataclass(frozen=True)
class PromptPart:
    """A prompt part. Its `kv` is reused (blended if `blend`). Parts without `kv` are computed."""

    ids: tuple[int, ...]
    kv: ChunkKV | None = None
    blend: bool = True


@dataclass(frozen=True)
class KVSource:
    """A `LayerSource` over chunks in memory: chunk i has the KV of segment i."""

    chunks: Sequence[ChunkKV] = ()

    def __iter__(self) -> Iterator[Sequence[Layer]]:
        by_layer = zip(*(chunk.layers for chunk in self.chunks), strict=True)
        yield [dict(enumerate(layers)) for layers in by_layer]
