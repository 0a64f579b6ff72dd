"""Cache layers that take rows at indices while a prompt is fused, and grow in place while an answer is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ragfuse.fuse.attend import Ragged
from ragfuse.fuse.fusor import Buffers

ROOM = 64
"""Rows that a layer grows by at least when it is full."""


class Taker(Protocol):
    """Receives what a layer computed during a fused prefill and returns the layer's whole KV."""

    def take(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values [1, H, R, D] of the rows in flight -> [1, H, T, D]."""
        ...


class RowLayer(CacheLayerMixin):
    """One layer's KV [B, H, length, D] in buffers with room to grow; a full-attention layer to transformers."""

    is_sliding = False
    is_croppable = True

    def __init__(self, layer: int, taker: Taker | None = None) -> None:
        super().__init__()
        self.layer, self.taker, self.length = layer, taker, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers like the given states."""
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Take over buffers [B, H, >= length, D]."""
        self.keys, self.values, self.length, self.is_initialized = keys, values, length, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        """While fusing: hand over the rows in flight. Afterwards: append. Gives the whole KV either way."""
        if self.taker is not None:
            return self.taker.take(self.layer, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.length + key_states.shape[2]
        if stop > self.keys.shape[2]:
            self._grow(stop)
        self.keys[:, :, self.length : stop] = key_states
        self.values[:, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def _grow(self, needed: int) -> None:
        size = max(needed + ROOM, needed * 5 // 4)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], size, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys after this step, 0)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Rows held; 0 while fusing, so that masks and positions are made for a whole prompt."""
        return 0 if self.taker is not None else self.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows."""
        self.length -= abs(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self.length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in a new order, for beam search."""
        self.batch_select_indices(beam_idx.to(self.keys.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch `repeats` times."""
        self.keys = self.keys.repeat_interleave(repeats, dim=0)
        self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows of the batch."""
        self.keys, self.values = self.keys[indices], self.values[indices]


class RowCache(Cache):
    """A cache of `RowLayer`s."""

    def __init__(self, n_layers: int, taker: Taker | None = None) -> None:
        super().__init__(layers=[RowLayer(layer, taker) for layer in range(n_layers)])

    def fill(self, buffers: Buffers) -> None:
        """Take over the KV of a fused prompt; from now on the layers append."""
        for index, layer in enumerate(self.layers):
            keys, values = buffers.keys[index], buffers.values[index]
            if keys is None or values is None:
                raise RuntimeError(f"Layer {index} holds no KV after the prefill.")
            layer.taker = None
            layer.fill(keys, values, buffers.n_tokens)

    def adopt(self, other: DynamicCache) -> None:
        """Take over what a plain forward left in a cache of transformers."""
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.fill(source.keys, source.values, source.keys.shape[2])

    @property
    def length(self) -> int:
        """Rows held."""
        return int(self.layers[0].length)

    @length.setter
    def length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length


class JointLayer(RowLayer):
    """One layer of several caches, as one of all their rows, for one step: each keeps what is its own.

    is_padded: gives the KV of all, zeros before the shorter ones [sum B, H, longest, D]. Else it leaves in `ragged`
    where each one's KV stands, and gives back what it was given.
    """

    def __init__(self, layer: int, parts: Sequence[RowLayer], ragged: Ragged, is_padded: bool) -> None:
        super().__init__(layer)
        self._parts, self._ragged, self._is_padded = parts, ragged, is_padded
        self.length, self.is_initialized = max(part.length for part in parts), True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        """Every cache takes its own new rows."""
        sizes = self._ragged.sizes
        news = zip(self._parts, torch.split(key_states, sizes), torch.split(value_states, sizes), strict=True)
        self._ragged.newest = key_states
        self._ragged.held = held = [part.update(keys, values) for part, keys, values in news]
        if not self._is_padded:
            return key_states, value_states
        longest = max(part.length for part in self._parts)
        return _stacked([keys for keys, _ in held], longest), _stacked([values for _, values in held], longest)


class JointCache(Cache):
    """Several caches as one, for one step of all their rows; see `JointLayer`."""

    def __init__(self, caches: Sequence[RowCache], ragged: Ragged, is_padded: bool) -> None:
        each = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[JointLayer(at, parts, ragged, is_padded) for at, parts in enumerate(each)])


def _stacked(states: Sequence[Tensor], longest: int) -> Tensor:
    """Zeros before the shorter ones."""
    return torch.cat([torch.nn.functional.pad(each, (0, 0, longest - each.shape[2], 0)) for each in states])
