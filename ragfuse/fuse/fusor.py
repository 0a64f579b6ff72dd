"""The bookkeeping of one fused prefill, layer by layer: which rows are computed, and where KV goes.

Cached runs are copied into preallocated buffers. The rows to compute pass through the model, fewer in each layer, and
their fresh keys and values overwrite the cached ones (CacheBlend 4.2). The caller that drives the model calls
`Fusion.choose` before a layer and `Fusion.write` with what that layer computed. This module knows neither models nor
stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ragfuse.fuse.attend import RowMask
from ragfuse.fuse.rope import angles, place
from ragfuse.fuse.select import Candidates, Policy
from ragfuse.types.kv import LayerKV, RopeLayout


@dataclass(frozen=True)
class CachedRun:
    """A cached run of tokens in a prompt.

    Args:
        segment: Index of its segment in the prompt.
        lo: Its first row in the prompt.
        hi: The row after its last.
        shift: Positions by which the keys read for it are rotated, as they are stored at positions 0, 1, ... of the run
            (`Segment.shift`).
        blend: Whether a policy may recompute rows of it (not for an exact prefix).
    """

    segment: int
    lo: int
    hi: int
    shift: int
    blend: bool


class LayerSource(Protocol):
    """A source of cached KV that is read layer by layer, in order."""

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """Return one layer of every cached run, by segment; None for a run that can no longer be read.

        Keys stand at the positions that the run was stored with, of which 0 is its first token.
        """
        ...

    def ready(self) -> int:
        """Return how many of the next layers `read` returns without waiting; it may exceed the layers there are."""
        ...


class LostRun(Exception):
    """A cached run became unreadable during the prefill, which must be restarted without it."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"segment {segment} cannot be read any more")
        self.segment = segment


class Buffers:
    """Preallocated KV of a whole prompt: keys and values [1, H, T + room, D] per layer.

    Rows of cached runs are filled by `open`, computed rows by `write`; all others are uninitialised.

    Args:
        n_tokens: T, the tokens of the prompt.
        runs: The cached runs in the prompt.
        source: Where their KV is read from.
        rope: The rotation of each layer; None where keys carry no position.
        device: Where the buffers lie.
        room: Extra rows for the tokens of the answer.
        at_once_nbytes: Most bytes of keys that `open` copies at once, of as many layers as are ready. 0: layer by
            layer, best on a CPU. On a GPU a layer's copies take less time than starting them.
    """

    def __init__(
        self,
        n_tokens: int,
        runs: Sequence[CachedRun],
        source: LayerSource,
        rope: Sequence[RopeLayout | None],
        device: torch.device,
        room: int = 0,
        at_once_nbytes: int = 0,
    ) -> None:
        self.n_tokens = n_tokens
        self.keys: list[Tensor | None] = [None] * len(rope)
        self.values: list[Tensor | None] = [None] * len(rope)
        self._runs, self._source, self._rope = runs, source, rope
        self._device, self._room, self._at_once_nbytes = device, room, at_once_nbytes
        self._angles: dict[RopeLayout, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._rope)

    def open(self, layer: int) -> None:
        """Read the cached runs of a layer and copy them to their rows, rotated; a second call does nothing.

        Raises:
            LostRun: A run cannot be read any more, or has another shape than the others.
        """
        if self.keys[layer] is not None or not self._runs:
            return
        found = [self._read(layer)]
        for follows in range(layer + 1, layer + self._at_once(layer, found[0])):
            found.append(self._read(follows))
        for at, alike in _alike(found, self._rope[layer : layer + len(found)]):
            self._copy(layer + at, alike)

    def _read(self, layer: int) -> list[LayerKV]:
        """Return one layer of every cached run, in their order."""
        found = self._source.read(layer)
        read = list[LayerKV]()
        for run in self._runs:
            kv = found.get(run.segment)
            if kv is None or kv.n_tokens != run.hi - run.lo:
                raise LostRun(run.segment)
            read.append(kv)
        return read

    def _at_once(self, layer: int, first: Sequence[LayerKV]) -> int:
        """Return how many layers are copied together: `layer`, which was read (`first`), and those that follow."""
        if not self._at_once_nbytes:
            return 1
        keys = first[0].keys
        nbytes = keys.shape[0] * self.n_tokens * keys.shape[-1] * keys.element_size()
        most = min(len(self) - layer, max(1, self._at_once_nbytes // nbytes))
        return min(most, 1 + self._source.ready())

    def _copy(self, layer: int, found: Sequence[Sequence[LayerKV]]) -> None:
        """Copy consecutive layers of every run, alike in shape and rotation, to their rows, and rotate them there.

        Args:
            layer: The first of them.
            found: By layer, every run's KV.
        """
        n_layers, length = len(found), self.n_tokens + self._room
        keys, values = (
            torch.empty((n_layers, 1, *_row(part, length)), dtype=part.dtype, device=self._device)
            for part in (found[0][0].keys, found[0][0].values)
        )
        for run, kv in zip(self._runs, found[0], strict=True):
            if not (_same_shape(keys[0], kv.keys) and _same_shape(values[0], kv.values)):
                raise LostRun(run.segment)
        all_keys, all_values = keys[:, 0], values[:, 0]
        for at, run in enumerate(self._runs):
            _copy_to(all_keys.narrow(2, run.lo, run.hi - run.lo), [kv[at].keys for kv in found])
            _copy_to(all_values.narrow(2, run.lo, run.hi - run.lo), [kv[at].values for kv in found])
        self._rotate(all_keys, all_values, self._rope[layer])
        for at in range(n_layers):
            self.keys[layer + at], self.values[layer + at] = keys[at], values[at]

    def get(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [1, H, T, D] of a layer."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            raise RuntimeError(f"Layer {layer} was read before any KV was written to it.")
        return keys[:, :, : self.n_tokens], values[:, :, : self.n_tokens]

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write freshly computed KV of a layer to its rows.

        Args:
            layer: Index of the layer.
            rows: int64 [R].
            keys: [1, H, R, D].
            values: [1, H, R, Dv].

        Raises:
            LostRun: The cached KV has another shape than the model's own.
        """
        self._allocated(layer, keys[0], values[0], self._runs[0] if self._runs else None)
        all_keys, all_values = self.get(layer)
        if len(rows) == self.n_tokens:
            all_keys.copy_(keys)
            all_values.copy_(values)
            return
        all_keys[0].index_copy_(1, rows, keys[0])
        all_values[0].index_copy_(1, rows, values[0])

    def _allocated(
        self, layer: int, like_keys: Tensor, like_values: Tensor, run: CachedRun | None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's buffers [1, H, T + room, D], allocated on first use for tensors like the given [H, n, D].

        Raises:
            LostRun: The buffers have another shape than `run`, so one of the two is not KV of this model.
        """
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            length, device = self.n_tokens + self._room, self._device
            keys, values = (
                torch.empty((1, part.shape[0], length, part.shape[-1]), dtype=part.dtype, device=device)
                for part in (like_keys, like_values)
            )
            self.keys[layer], self.values[layer] = keys, values
        elif run is not None and not (_same_shape(keys, like_keys) and _same_shape(values, like_values)):
            raise LostRun(run.segment)
        return keys, values

    def _rotate(self, keys: Tensor, values: Tensor, layout: RopeLayout | None) -> None:
        """Rotate the copied runs to their positions, all at once; rows that do not move rotate by 0, which is exact.

        Args:
            keys: [layers, H, T + room, D].
            values: [layers, H, T + room, Dv].
            layout: The rotation of all these layers.
        """
        shifted = [run for run in self._runs if run.shift]
        if layout is None or not shifted:
            return
        lo, hi = min(run.lo for run in shifted), max(run.hi for run in shifted)
        if layout not in self._angles:
            which = torch.zeros(hi - lo, dtype=torch.int64)  # 0: rows that do not move
            for number, run in enumerate(shifted, 1):
                which[run.lo - lo : run.hi - lo] = number
            deltas = torch.tensor([0, *(run.shift for run in shifted)], dtype=torch.float64)
            cos, sin = angles(layout, deltas[:, None], self._device)
            which = which.to(self._device)
            self._angles[layout] = cos.index_select(0, which), sin.index_select(0, which)
        part = (keys if layout.part == "keys" else values)[:, :, lo:hi]
        place(part, part, self._angles[layout], layout)


def _row(part: Tensor, length: int) -> tuple[int, int, int]:
    """Return the shape of a buffer of `length` rows for a part [H, n, D]."""
    return part.shape[0], length, part.shape[-1]


def _alike(
    found: Sequence[Sequence[LayerKV]], rope: Sequence[RopeLayout | None]
) -> Iterator[tuple[int, Sequence[Sequence[LayerKV]]]]:
    """Cut consecutive layers where shape, dtype or rotation change; yield each part with the index of its first layer.

    Args:
        found: By layer, every run's KV.
        rope: The rotation of each layer.
    """
    kinds = [
        (layout, *((kv.keys.shape, kv.values.shape, kv.keys.dtype, kv.values.dtype) for kv in layer))
        for layer, layout in zip(found, rope, strict=True)
    ]
    first = 0
    for _, alike in groupby(kinds):
        end = first + len(list(alike))
        yield first, found[first:end]
        first = end


def _copy_to(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy one tensor [H, n, D] per layer into `out` [layers, H, n, D], in one copy where they lie evenly spaced."""
    spaced = parts[0] if len(parts) == 1 else _spaced(parts)
    if spaced is not None:
        out.copy_(spaced, non_blocking=True)
        return
    for layer, part in zip(out, parts, strict=True):
        layer.copy_(part, non_blocking=True)


def _spaced(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a view [layers, H, n, D] of tensors that lie in one storage at even distances; None if they do not."""
    first, step = parts[0], parts[1].storage_offset() - parts[0].storage_offset()
    storage, strides = first.untyped_storage().data_ptr(), first.stride()
    for before, part in pairwise(parts):
        even = part.storage_offset() - before.storage_offset() == step > 0 and part.stride() == strides
        if not even or part.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(parts), *first.shape), (step, *strides))


def _same_shape(buffer: Tensor, part: Tensor) -> bool:
    """Whether a part [H, n, D] fits a buffer [1, H, T, D]."""
    return buffer.shape[1] == part.shape[0] and buffer.shape[-1] == part.shape[-1]


def candidate_rows(runs: Sequence[CachedRun], n_tokens: int) -> Tensor:
    """Return the rows that a policy may recompute, int64 [C], sorted: those of runs with `blend`, but the last row."""
    chosen = torch.zeros(n_tokens, dtype=torch.bool)
    for run in runs:
        chosen[run.lo : run.hi] = run.blend
    chosen[-1] = False
    return chosen.nonzero()[:, 0]


class Fusion:
    """The row selection of one fused prefill: decides layer by layer which rows are computed, and stores their KV.

    Args:
        buffers: KV of the whole prompt.
        positions: int64 [T], the position of every row.
        runs: The cached runs in the prompt.
        policy: Chooses the rows to recompute.
        ratio: Share of the candidate rows to recompute, 0..1.
        score: float32 [C], what the policy wants to know of each candidate (`Policy.wants`).

    Attributes:
        candidates: int64 [C], sorted: the rows of cached chunks that the policy may recompute.
        rows: int64 [R], sorted: the rows computed in the current layer.
        chosen: int64, the candidates chosen at the policy's check layer.
        counts: How many candidates were computed, per layer.
    """

    def __init__(
        self,
        buffers: Buffers,
        positions: Tensor,
        runs: Sequence[CachedRun],
        policy: Policy,
        ratio: float,
        score: Tensor | None = None,
    ) -> None:
        self.buffers, self.positions, self.policy = buffers, positions, policy
        cached = torch.zeros(len(positions), dtype=torch.bool)
        for run in runs:
            cached[run.lo : run.hi] = True
        cached[-1] = False
        candidates = candidate_rows(runs, len(positions))
        chunk, offset = (part[candidates].to(positions.device) for part in _places(runs, len(positions)))
        self._forced = (~cached).nonzero()[:, 0].to(positions.device)
        self.candidates = candidates.to(positions.device)
        self.candidate_set = Candidates(len(buffers), ratio, len(self._forced), chunk, offset, score)
        self._active = torch.arange(len(self.candidates), device=positions.device)
        self._deviation: Tensor | None = None
        self.rows = self._merge()
        self.chosen = self.rows[:0]
        self.counts: list[int] = []
        self._mask: RowMask | None = None

    def needs_check(self, layer: int) -> bool:
        """Whether `check` must be given this layer's K and V of all current rows before `choose` is called."""
        return layer > 0 and layer == self.policy.check_layer and len(self._active) > 0

    def check(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Measure how far the current rows' fresh KV, keys and values [1, H, R, D], deviates from the cached KV."""
        self._deviation = self._measure(layer, keys, values)

    def choose(self, layer: int) -> Tensor | None:
        """Choose the rows that are computed in `layer`.

        Returns:
            int64, indices of the kept rows into the previous layer's rows; None if all are kept.
        """
        before = self.rows
        if layer >= self.policy.check_layer:
            self._active = self.policy.choose(self.candidate_set, layer, self._active, self._deviation)
            self._deviation = None
            if layer == self.policy.check_layer:
                self.chosen = self.candidates[self._active]
        rows = self._merge() if len(self._active) + len(self._forced) < len(before) else before
        self.counts.append(len(self._active))
        if rows is before:
            return None
        self.rows, self._mask = rows, None
        return torch.searchsorted(before, rows)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the KV [1, H, R, D] that a layer computed for `rows`, and return the layer's whole KV [1, H, T, D]."""
        if self._is_thinned(layer + 1):
            self._deviation = self._measure(layer, keys, values)
        self.buffers.write(layer, self.rows, keys, values)
        return self.buffers.get(layer)

    def keep_last(self) -> Tensor:
        """Drop all rows but the prompt's last; return its index into the previous rows, int64 [1]."""
        last = torch.tensor([len(self.rows) - 1], device=self.rows.device)
        self.rows, self._mask = self.rows[-1:], None
        return last

    def mask(self) -> RowMask:
        """Return the attention mask of the current rows; layers that compute the same rows share it."""
        if self._mask is None:
            self._mask = RowMask(self.rows, self.positions)
        return self._mask

    @property
    def mean_ratio(self) -> float:
        """Mean share of the candidates that was computed per layer, over the layers from the check layer on."""
        counts = self.counts[self.policy.check_layer :]
        return sum(counts) / (len(counts) * len(self.candidates)) if counts and len(self.candidates) else 0.0

    def _is_thinned(self, layer: int) -> bool:
        """Whether the policy will drop rows in `layer`; then the deviation is measured in the layer before."""
        n_active, follows = len(self._active), self.policy.check_layer < layer < len(self.buffers)
        return follows and n_active > 0 and self.policy.thins(self.candidate_set, layer, n_active)

    def _merge(self) -> Tensor:
        return torch.cat([self._forced, self.candidates[self._active]]).sort().values

    def _measure(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """Return each active candidate's squared L2 distance from the cached KV, over heads and dims, float32 [m]."""
        old_keys, old_values = self.buffers.get(layer)
        pairs = {"k": [(keys, old_keys)], "v": [(values, old_values)]}
        pairs["kv"] = pairs["k"] + pairs["v"]
        total = torch.zeros(len(self.rows), device=self.rows.device)
        for new, old in pairs[self.policy.compare]:
            change = new[0] - old[0].index_select(1, self.rows)
            total += vector_norm(change, dim=(0, 2), dtype=torch.float32).square_()
        return total[torch.searchsorted(self.rows, self.candidates[self._active])]


def _places(runs: Sequence[CachedRun], n_tokens: int) -> tuple[Tensor, Tensor]:
    """Return every row's segment and its row in it, int64 [T] each; 0 outside of runs."""
    segment, offset = torch.zeros(2, n_tokens, dtype=torch.int64)
    for run in runs:
        segment[run.lo : run.hi] = run.segment
        offset[run.lo : run.hi] = torch.arange(run.hi - run.lo)
    return segment, offset
