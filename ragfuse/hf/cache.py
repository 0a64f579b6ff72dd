"""A transformers cache that writes rows at any index during a fused prefill, and appends rows
during decoding.

KV that concurrent prompts have in common is stored once, outside the prompts' caches (Prompt Cache
3.4). The buffers of a cache then contain only rows that are not shared. Attention reads the common
KV once for all prompts of a batch (`fuse.attend.attend_ragged`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ragfuse.fuse.attend import KV, Ragged
from ragfuse.fuse.fusor import Buffers

CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in CausalLMOutputWithPast.__dataclass_fields__
)
"""Name of the cache in a model's arguments and outputs. transformers 5.24 changed this name."""
GROWTH_ROWS = 64
"""Minimum number of rows that are added to a layer's buffers when the buffers are full."""


Receiver = Callable[[int, Tensor, Tensor], KV]
"""Called with a layer's index and new KV [1, H, R, D]; returns the layer's KV for attention."""


@dataclass(frozen=True, eq=False)
class FrozenRows:
    """An immutable range of a prompt's rows that several caches may share.

    Args:
        lo: First row of the range.
        kv: KV [1, H, n, D] of the n rows.
        owner: The range stays in `SharedKV` as long as this object exists.
    """

    lo: int
    kv: KV
    owner: object

    @property
    def hi(self) -> int:
        """One past the last row of the range."""
        return self.lo + int(self.kv[0].shape[2])


class RowLayer(CacheLayerMixin):
    """A full-attention cache layer for transformers: KV [B, H, length, D] in growable buffers.

    Args:
        layer: Index of the layer.
        receiver: Receives new KV during a fused prefill. If None, new rows are appended.

    Attributes:
        length: Number of rows.
        common: Ranges of rows that are stored outside the buffers, in row order.
    """

    is_sliding = False

    def __init__(self, layer: int, receiver: Receiver | None = None) -> None:
        super().__init__()
        self.layer, self.receiver, self.length = layer, receiver, 0
        self.common: tuple[FrozenRows, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `fill` sets the buffers before rows are appended."""

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Use tensors [B, H, >= length, D] as buffers. Rows from `length` on must be finite."""
        self.keys, self.values, self.length, self.is_initialized = keys, values, length, True
        self.common = ()

    def share(self, ranges: Sequence[FrozenRows]) -> None:
        """Use shared ranges of rows, and remove these rows from the layer's own buffers.

        Args:
            ranges: The shared ranges, in row order. No range may include the last row.
        """
        keys, values = self.whole()
        self.common = tuple(ranges)
        edges = [0, *(edge for frozen in ranges for edge in (frozen.lo, frozen.hi)), self.length]
        rows = [slice(*both) for both in zip(edges[::2], edges[1::2], strict=True)]
        self.keys, self.values = (
            _with_room([states[:, :, part] for part in rows], GROWTH_ROWS)
            for states in (keys, values)
        )

    def whole(self) -> KV:
        """Return the keys and values of all rows [B, H, length, D]; see `rows`."""
        return self.rows(0, self.length)

    def rows(self, lo: int, hi: int) -> KV:
        """Return KV of rows lo:hi [B, H, hi - lo, D]: views if `common` is empty, else copies."""
        keys, values = self.keys, self.values
        if self.common:
            keys, values = self._with_frozen(keys, 0), self._with_frozen(values, 1)
        return keys[:, :, lo:hi], values[:, :, lo:hi]

    def held(self) -> list[KV]:
        """Return the KV of all rows, uncopied, in parts: buffered rows, then each shared range."""
        n_buffered = self.n_buffered
        return [
            (self.keys[:, :, :n_buffered], self.values[:, :, :n_buffered]),
            *(frozen.kv for frozen in self.common),
        ]

    @property
    def n_buffered(self) -> int:
        """Number of rows in the layer's own buffers."""
        return self.length - sum(frozen.hi - frozen.lo for frozen in self.common)

    def _with_frozen(self, buffered: Tensor, which: int) -> Tensor:
        """Return the keys (`which` 0) or values (`which` 1) of all rows, in row order."""
        parts, at, used = list[Tensor](), 0, 0
        for frozen in self.common:
            free = frozen.lo - at
            parts += [buffered[:, :, used : used + free], frozen.kv[which]]
            used, at = used + free, frozen.hi
        return torch.cat([*parts, buffered[:, :, used:]], 2)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> KV:
        """Append new rows, or pass new rows to the receiver; return the layer's whole KV."""
        if self.receiver is not None:
            return self.receiver(self.layer, key_states, value_states)
        self.append(key_states, value_states)
        return self.whole()

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append rows [B, H, n, D]."""
        n_buffered, count = self.n_buffered, key_states.shape[2]
        if (needed := n_buffered + count) > self.keys.shape[2]:
            room = max(GROWTH_ROWS, needed // 16) + count
            self.keys, self.values = (
                _with_room([states[:, :, :n_buffered]], room) for states in (self.keys, self.values)
            )
        self.keys[:, :, n_buffered : n_buffered + count] = key_states
        self.values[:, :, n_buffered : n_buffered + count] = value_states
        self.length += count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys after this step, and offset 0, for transformers' masks."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of rows; 0 during a fused prefill, so that the mask covers all rows."""
        return 0 if self.receiver is not None else self.length

    def get_max_length(self) -> int:
        """Return -1, which means that the number of rows is not limited."""
        return -1


def _with_room(parts: Sequence[Tensor], room: int) -> Tensor:
    """Return a buffer that begins with the parts, followed by `room` rows of zeros."""
    size = sum(part.shape[2] for part in parts)
    made = parts[0].new_empty(*parts[0].shape[:2], size + room, parts[0].shape[3])
    torch.cat(list(parts), 2, out=made[:, :, :size])
    made[:, :, size:] = 0
    return made


class RowCache(Cache):
    """A transformers cache whose layers are `RowLayer`s."""

    def __init__(self, n_layers: int, receiver: Receiver | None = None) -> None:
        super().__init__(layers=[RowLayer(layer, receiver) for layer in range(n_layers)])

    def fill(self, buffers: Buffers) -> None:
        """Use the buffers of a fused prefill as KV; later rows are appended."""
        for index, layer in enumerate(self.layers):
            layer.receiver = None
            layer.fill(buffers.keys[index], buffers.values[index], buffers.n_tokens)

    def adopt(self, other: DynamicCache) -> None:
        """Use the tensors of a transformers cache as KV, without a copy."""
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.fill(source.keys, source.values, source.keys.shape[2])

    @property
    def length(self) -> int:
        """Number of rows."""
        return int(self.layers[0].length)

    @length.setter
    def length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length


class JointLayer(RowLayer):
    """One layer of several caches as one batch, for one decoding step.

    Args:
        layer: Index of the layer.
        parts: This layer of each cache.
        ragged: Receives the KV of each cache, for ragfuse's attention function.
    """

    def __init__(self, layer: int, parts: Sequence[RowLayer], ragged: Ragged) -> None:
        super().__init__(layer)
        self._parts, self._ragged = parts, ragged
        self.length, self.is_initialized = max(part.length for part in parts), True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append each prompt's new row to the prompt's cache; return both arguments unchanged."""
        self._ragged.newest = key_states
        for part, *each in zip(
            self._parts, torch.split(key_states, 1), torch.split(value_states, 1), strict=True
        ):
            part.append(*each)
        self._ragged.kv_parts = [part.held() for part in self._parts]
        return key_states, value_states


class JointCache(Cache):
    """Several caches as one batch for one decoding step; see `JointLayer`."""

    def __init__(self, caches: Sequence[RowCache], ragged: Ragged) -> None:
        each = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[JointLayer(at, parts, ragged) for at, parts in enumerate(each)])


MIN_SHARED_ROWS = 64
"""Minimum rows of a shared span, because each span needs an attention call per layer."""


@dataclass(frozen=True)
class SharedSpan:
    """Rows lo:hi of a prompt. Spans with equal `name` have bit-identical KV in all prompts."""

    lo: int
    hi: int
    name: Hashable


class _Rows(dict[int, KV]):
    """The KV [1, H, n, D] of a span, by layer index."""


class SharedKV:
    """KV shared by concurrent prompts; freed when no prompt uses it any more. Thread-safe."""

    def __init__(self) -> None:
        self._rows: WeakValueDictionary[Hashable, _Rows] = WeakValueDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of shared spans in memory."""
        return len(self._rows)

    def share(
        self, cache: RowCache, spans: Sequence[SharedSpan], windows: Sequence[int | None]
    ) -> None:
        """Replace spans of a prompt's cache by equal KV that other prompts already use.

        If no other prompt has a span, the span's KV is copied from this prompt.

        Args:
            cache: KV of the prompt.
            spans: The spans of the prompt, in row order.
            windows: Sliding window of each layer, or None. Layers with a sliding window are not
                shared.
        """
        # the last row is not shared: each prompt computes it, and `generate` drops it first
        last = cache.length - 1
        shared = [
            SharedSpan(each.lo, min(each.hi, last), (each.name, min(each.hi, last) - each.lo))
            for each in spans
        ]
        shared = [span for span in shared if span.hi - span.lo >= MIN_SHARED_ROWS]
        if not shared:
            return
        with self._lock:
            owners = [self._rows.setdefault(span.name, _Rows()) for span in shared]
            for layer, window in zip(cache.layers, windows, strict=True):
                if window is not None:
                    continue
                ranges = list[FrozenRows]()
                for span, rows in zip(shared, owners, strict=True):
                    if layer.layer not in rows:  # the first prompt with this span
                        keys, values = layer.rows(span.lo, span.hi)
                        rows[layer.layer] = keys.clone(), values.clone()
                    ranges.append(FrozenRows(span.lo, rows[layer.layer], rows))
                layer.share(ranges)
        give_back()


def give_back() -> None:
    """Return freed memory to the operating system. glibc would keep the memory for reuse."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
