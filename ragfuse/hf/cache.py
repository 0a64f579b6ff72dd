"""Cache layers that take rows at indices while a prompt is fused, and grow in place while an answer is written.

Stretches of rows may stand outside, once for several caches (`hf/common.py`): the buffers hold the rows between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ragfuse.fuse.attend import KV, Ragged
from ragfuse.fuse.fusor import Buffers

GROWTH_ROWS = 64
"""Rows that a layer grows by at least when it is full."""


class Taker(Protocol):
    """Receives what a layer computed during a fused prefill and returns the layer's whole KV."""

    def take(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values [1, H, R, D] of the rows in flight -> [1, H, T, D]."""
        ...


@dataclass(frozen=True, eq=False)
class FrozenRows:
    """KV [1, H, n, D] of a prompt's rows from `lo` on, written by nobody any more. owner: what is there as long."""

    lo: int
    kv: KV
    owner: object

    @property
    def hi(self) -> int:
        """The row after its last."""
        return self.lo + int(self.kv[0].shape[2])


class RowLayer(CacheLayerMixin):
    """One layer's KV [B, H, length, D] in buffers with room to grow; a full-attention layer to transformers.

    common: stretches of its rows, by row, that the buffers lack; whoever wants the KV whole makes it so (`gather`).
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, layer: int, taker: Taker | None = None) -> None:
        super().__init__()
        self.layer, self.taker, self.length = layer, taker, 0
        self.common: tuple[FrozenRows, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers like the given states."""
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Take over buffers [B, H, >= length, D]."""
        self.keys, self.values, self.length, self.is_initialized = keys, values, length, True
        self.common = ()

    def share(self, stretches: Sequence[FrozenRows]) -> None:
        """Let go of rows that stand outside from now on: one stretch after the other, none up to the last row."""
        keys, values = self.whole()
        self.common = tuple(stretches)
        self.keys, self.values = (self._with_room(_between(states, stretches)) for states in (keys, values))

    def gather(self) -> None:
        """Hold all rows in buffers of its own again, those too that were taken back and may yet be revealed."""
        if self.common:
            self.keys, self.values = self._with_frozen(self.keys, 0), self._with_frozen(self.values, 1)
            self.common = ()

    def whole(self) -> KV:
        """All rows [B, H, length, D]: views, or a copy where some stand outside."""
        own = self.own
        keys, values = self.keys[:, :, :own], self.values[:, :, :own]
        if not self.common:
            return keys, values
        return self._with_frozen(keys, 0), self._with_frozen(values, 1)

    def rows(self, lo: int, hi: int) -> KV:
        """Rows lo:hi [B, H, hi - lo, D]: views, or a copy where some of them stand outside."""
        outside = 0
        for stretch in self.common:
            if stretch.lo < hi and lo < stretch.hi:
                keys, values = self.whole()
                return keys[:, :, lo:hi], values[:, :, lo:hi]
            outside += stretch.hi - stretch.lo if stretch.hi <= lo else 0
        lo, hi = lo - outside, hi - outside
        return self.keys[:, :, lo:hi], self.values[:, :, lo:hi]

    def held(self) -> list[KV]:
        """All rows in stretches: its own, then those that stand outside."""
        own = self.own
        return [(self.keys[:, :, :own], self.values[:, :, :own]), *(stretch.kv for stretch in self.common)]

    @property
    def own(self) -> int:
        """Rows in the buffers."""
        return self.length - sum(stretch.hi - stretch.lo for stretch in self.common)

    def _with_frozen(self, own: Tensor, which: int) -> Tensor:
        """Own rows and stretches, each where it stands; which: keys (0) or values (1)."""
        parts, at, taken = list[Tensor](), 0, 0
        for stretch in self.common:
            free = stretch.lo - at
            parts += [own[:, :, taken : taken + free], stretch.kv[which]]
            taken, at = taken + free, stretch.hi
        return torch.cat([*parts, own[:, :, taken:]], 2)

    def _with_room(self, parts: Sequence[Tensor]) -> Tensor:
        """Buffers that begin with the parts."""
        size = sum(part.shape[2] for part in parts)
        made = parts[0].new_empty(*parts[0].shape[:2], size + GROWTH_ROWS, parts[0].shape[3])
        torch.cat(list(parts), 2, out=made[:, :, :size])
        return made

    def update(self, key_states: Tensor, value_states: Tensor, *args: object) -> KV:
        """While fusing: hand over the rows in flight. Afterwards: append. Gives the whole KV either way."""
        if self.taker is not None:
            return self.taker.take(self.layer, key_states, value_states)
        self.gather()
        self.append(key_states, value_states)
        return self.whole()

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """New rows at the end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        own, count = self.own, key_states.shape[2]
        if own + count > self.keys.shape[2]:
            self._grow(own, own + count)
        self.keys[:, :, own : own + count] = key_states
        self.values[:, :, own : own + count] = value_states
        self.length += count

    def _grow(self, own: int, needed: int) -> None:
        size = max(needed + GROWTH_ROWS, needed * 5 // 4)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], size, old.shape[3])
            new[:, :, :own] = old[:, :, :own]
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
        self.gather()
        self.length -= abs(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self.length, self.common = 0, ()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in a new order, for beam search."""
        self.batch_select_indices(beam_idx.to(self.keys.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch `repeats` times."""
        self.gather()
        self.keys = self.keys.repeat_interleave(repeats, dim=0)
        self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows of the batch."""
        self.gather()
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
    def is_apart(self) -> bool:
        """Whether some of its rows stand outside."""
        return any(layer.common for layer in self.layers)

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
        if self._is_padded:
            whole = [part.update(keys, values) for part, keys, values in news]
            longest = max(part.length for part in self._parts)
            return _stacked([keys for keys, _ in whole], longest), _stacked([values for _, values in whole], longest)
        for part, keys, values in news:
            part.append(keys, values)
        self._ragged.held = [part.held() for part in self._parts]
        return key_states, value_states


class JointCache(Cache):
    """Several caches as one, for one step of all their rows; see `JointLayer`."""

    def __init__(self, caches: Sequence[RowCache], ragged: Ragged, is_padded: bool) -> None:
        each = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[JointLayer(at, parts, ragged, is_padded) for at, parts in enumerate(each)])


def _stacked(states: Sequence[Tensor], longest: int) -> Tensor:
    """Zeros before the shorter ones."""
    return torch.cat([torch.nn.functional.pad(each, (0, 0, longest - each.shape[2], 0)) for each in states])


def _between(states: Tensor, stretches: Sequence[FrozenRows]) -> list[Tensor]:
    """The rows of [B, H, T, D] that no stretch covers."""
    stops, starts = [*(stretch.lo for stretch in stretches), states.shape[2]], [0, *(each.hi for each in stretches)]
    return [states[:, :, start:stop] for start, stop in zip(starts, stops, strict=True)]
