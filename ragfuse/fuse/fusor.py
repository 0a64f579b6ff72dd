"""The rows and KV buffers of one fused prefill, layer by layer.

Cached runs of tokens are copied into preallocated buffers. The rows to compute pass through the
model; later layers may compute fewer rows. Fresh keys and values overwrite the cached keys and
values (CacheBlend 4.2). The caller runs the model, and calls `Fusion.choose` before each layer and
`Fusion.write` with the KV that the layer computed. This module uses no model or store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import vector_norm

from ragfuse.fuse.attend import RowMask
from ragfuse.fuse.rope import angles, place
from ragfuse.fuse.select import Candidates, Policy
from ragfuse.types.kv import Layer, LayerKV, RopeLayout

PRIOR_ROWS = 24
"""The mean change of a chunk's recomputed rows includes this many additional rows of change 0."""


@dataclass(frozen=True)
class CachedRun:
    """A cached run of tokens in a prompt.

    Args:
        segment: Index of the run's segment in the prompt.
        lo: The run's first row in the prompt.
        hi: The run's last row in the prompt, plus 1.
        shift: Number of positions by which the stored keys are rotated (`Segment.shift`).
        blend: True if a policy may recompute rows of the run. False for exact KV, modules and
            history.
    """

    segment: int
    lo: int
    hi: int
    shift: int
    blend: bool


LayerSource = Iterable[Sequence[Layer]]
"""Yields the KV of all cached runs, in groups of consecutive layers that are read together.

Keys are rotated for the positions at which the run was encoded (`LayerKV`).
"""


class LostRun(Exception):
    """Raised if a prefill cannot read a cached run. The caller then restarts without the run."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"segment {segment} cannot be read any more")
        self.segment = segment


class Buffers:
    """The KV buffers of a whole prompt: keys and values [1, H, T + room, D] per layer.

    `open` fills the rows of cached runs, `write` fills computed rows. All other rows are 0, because
    attention and `write` multiply these rows by 0, which requires finite numbers.

    Args:
        n_tokens: T, the number of tokens in the prompt.
        runs: The cached runs in the prompt.
        source: The KV of `runs`.
        rope: The RoPE layout of each layer. None for a layer whose keys carry no position.
        device: The device of the buffers.
        room: Number of extra rows for the tokens of the answer.
        at_once_nbytes: Maximum bytes of keys that `open` copies at once, from layers that were read
            together. `open` copies at least one layer.
        padding: Number of rows after the prompt that `get` also returns, so that few different
            shapes occur.
        windows: Sliding window of each layer, or None. Layers with and without a window are in
            separate buffers, because prompts can share the KV of layers without a window
            (`hf/cache.py`), and sharing must free the buffers of these layers.
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
        padding: int = 0,
        windows: Sequence[int | None] = (),
    ) -> None:
        self._is_windowed = [window is not None for window in windows] or [False] * len(rope)
        self.n_tokens, self.n_keys = n_tokens, n_tokens + padding
        self.keys = dict[int, Tensor]()
        self.values = dict[int, Tensor]()
        self._seen = dict[int, tuple[Tensor, Tensor]]()
        self._blocks = dict[int, tuple[Tensor, ...]]()
        self.runs, self._source, self._rope = runs, iter(source), rope
        self._came = deque[Layer]()  # layers that were read but are not opened yet
        self._device, self._length, self._at_once_nbytes = (
            device,
            max(n_tokens + room, self.n_keys),
            at_once_nbytes,
        )
        self._angles: dict[RopeLayout, tuple[Tensor, Tensor]] = {}
        self._scratch = torch.empty(0, device=device)

    def __len__(self) -> int:
        return len(self._rope)

    def open(self, layer: int) -> None:
        """Copy a layer's KV of all cached runs to the runs' rows, and rotate the keys.

        A second call for the layer does nothing.

        Raises:
            LostRun: A run cannot be read any more, or the shapes of two runs differ.
        """
        if layer in self.keys or not self.runs:
            return
        if not self._came:
            self._came.extend(next(self._source))
        found = [self._next()]
        keys = found[0][0].keys
        nbytes = keys.shape[0] * self.n_tokens * keys.shape[-1] * keys.element_size()
        n_more = min(max(1, self._at_once_nbytes // nbytes) - 1, len(self._came))
        found += [self._next() for _ in range(n_more)]
        layers = slice(layer, layer + len(found))
        kinds = zip(found, self._rope[layers], self._is_windowed[layers], strict=True)
        for _, group in groupby(kinds, _kind):
            alike = [kv for kv, *_ in group]
            self._copy(layer, alike)
            layer += len(alike)

    def _next(self) -> list[LayerKV]:
        """Return the KV of every run in the next layer of the current group."""
        found = self._came.popleft()
        read = list[LayerKV]()
        for run in self.runs:
            kv = found.get(run.segment)
            if kv is None or kv.n_tokens != run.hi - run.lo:
                raise LostRun(run.segment)
            read.append(kv)
        return read

    def _copy(self, layer: int, found: Sequence[Sequence[LayerKV]]) -> None:
        """Copy the KV of consecutive layers (`found`, by layer and run) to buffers; rotate keys."""
        first = found[0][0]
        for run, kv in zip(self.runs, found[0], strict=True):
            if not (_same_shape(first.keys, kv.keys) and _same_shape(first.values, kv.values)):
                raise LostRun(run.segment)
        together = first.keys.shape == first.values.shape
        both = [("keys", "values")] if together else [("keys",), ("values",)]
        blocks = list[Tensor]()
        for names in both:
            block = self._empty(getattr(first, names[0]), len(found), len(names))
            for at, run in enumerate(self.runs):
                _copy_to(
                    block[..., run.lo : run.hi, :],
                    [[getattr(kv[at], name) for name in names] for kv in found],
                )
            blocks.append(block)
        self._rotate(blocks[0][:, 0], blocks[-1][:, -1], self._rope[layer])
        self._keep(layer, blocks)

    def _keep(self, layer: int, blocks: Sequence[Tensor]) -> None:
        """Store the buffers of consecutive layers, with views of the rows that attention sees.

        `blocks` is one block [layers, 2, H, T + room, D], or a block for keys and a block for
        values, each [layers, 1, H, T + room, D].
        """
        seen = [block[..., : self.n_keys, :] for block in blocks]
        parts = [part.unbind(0) for of in (blocks, seen) for part in (of[0][:, :1], of[-1][:, -1:])]
        whole = zip(*(block.unbind(0) for block in seen), strict=True)
        for at, (keys, values, *view, block) in enumerate(zip(*parts, whole, strict=True), layer):
            self.keys[at], self.values[at] = keys, values
            self._seen[at], self._blocks[at] = (view[0], view[1]), block

    def get(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, each [1, H, T + padding, D]."""
        return self._seen[layer]

    def write(
        self,
        layer: int,
        rows: Tensor,
        keys: Tensor,
        values: Tensor,
        spread: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write freshly computed KV of a layer to `rows`.

        Args:
            layer: Index of the layer.
            rows: int64 [R]. If a row is repeated, all its copies have equal KV.
            keys: [1, H, R, D].
            values: [1, H, R, Dv].
            spread: Two matrices that spread the changes of the computed rows over C chunks. The
                first, [C, R], averages the changes in each chunk. The second, [T + padding, C],
                adds these averages to the other rows of the chunk. If None, only `rows` change.

        Raises:
            LostRun: The shape of the cached KV differs from the shape of the computed KV.
        """
        if layer not in self._seen:
            together = keys.shape == values.shape
            like = (keys,) if together else (keys, values)
            self._keep(layer, [self._empty(part[0], 1, 3 - len(like)) for part in like])
        all_keys, all_values = self.get(layer)
        if self.runs and not (_same_shape(all_keys, keys) and _same_shape(all_values, values)):
            raise LostRun(self.runs[0].segment)
        blocks = self._blocks[layer]
        parts = (torch.cat((keys, values)),) if len(blocks) == 1 else (keys, values)
        for block, fresh in zip(blocks, parts, strict=True):
            if spread is not None:
                change = (fresh - block.index_select(2, rows)).flatten(0, 1)
                mean, rows_of = (weights.expand(len(change), -1, -1) for weights in spread)
                block.flatten(0, 1).baddbmm_(rows_of, torch.bmm(mean, change))
            block.index_copy_(2, rows, fresh)

    def _empty(self, like: Tensor, n_layers: int, n_parts: int) -> Tensor:
        """Return zeros [layers, parts, H, length, D] with H, D and dtype of `like` [H, n, D]."""
        size = (n_layers, n_parts, like.shape[0], self._length, like.shape[-1])
        return torch.zeros(size, dtype=like.dtype, device=self._device)

    def _rotate(self, keys: Tensor, values: Tensor, layout: RopeLayout | None) -> None:
        """Rotate all runs in keys or values [layers, H, T + room, D] to the prompt's positions."""
        shifted = [run for run in self.runs if run.shift]
        if layout is None or not shifted:
            return
        lo, hi = min(run.lo for run in shifted), max(run.hi for run in shifted)
        if layout not in self._angles:
            which = torch.from_numpy(_run_of_each_row(shifted, lo, hi))
            deltas = torch.tensor([0, *(run.shift for run in shifted)], dtype=torch.float64)
            cos, sin = angles(layout, deltas[:, None], self._device)
            which = which.to(self._device)
            self._angles[layout] = cos.index_select(0, which), sin.index_select(0, which)
        part = (keys if layout.part == "keys" else values)[:, :, lo:hi]
        size = 3 * part[..., 0].numel() * len(layout.inv_freq)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, device=self._device)
        place(part, self._angles[layout], layout, self._scratch)


def _kind(layer: tuple[Sequence[LayerKV], RopeLayout | None, bool]) -> tuple[object, ...]:
    """Return the properties of a layer that must be equal for layers to be copied together."""
    found, *kinds = layer
    shapes = ((kv.keys.shape, kv.values.shape, kv.keys.dtype, kv.values.dtype) for kv in found)
    return *kinds, *shapes


def _copy_to(out: Tensor, parts: Sequence[Sequence[Tensor]]) -> None:
    """Copy `parts`, tensors [H, n, D] by layer, to `out`, in one operation if evenly spaced."""
    spaced = _spaced(parts)
    if spaced is not None:
        out.copy_(spaced, non_blocking=True)
        return
    for layer, both in zip(out, parts, strict=True):
        for to, part in zip(layer, both, strict=True):
            to.copy_(part, non_blocking=True)


def _spaced(parts: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """Return `parts` as one view [layers, parts, H, n, D], or None if unevenly spaced in memory."""
    first = parts[0][0]
    offsets = [[part.storage_offset() for part in both] for both in parts]
    start = offsets[0][0]
    apart = offsets[-1][-1] - offsets[-1][0]
    step = (offsets[-1][0] - start) // max(1, len(parts) - 1)
    wanted = [
        [start + at * step + index * apart for index in range(len(both))]
        for at, both in enumerate(parts)
    ]
    kinds = {(part.untyped_storage().data_ptr(), part.stride()) for both in parts for part in both}
    if offsets != wanted or step < 0 or apart < 0 or len(kinds) > 1:
        return None
    return first.as_strided(
        (len(parts), len(parts[0]), *first.shape), (step, apart, *first.stride())
    )


def _same_shape(one: Tensor, other: Tensor) -> bool:
    """True if two tensors [..., H, n, D] have equal H and equal D."""
    return one.shape[-3] == other.shape[-3] and one.shape[-1] == other.shape[-1]


def candidates_of(
    runs: Sequence[CachedRun], n_tokens: int, n_layers: int, ratio: float, device: torch.device
) -> Candidates:
    """Return a prompt's `Candidates`: rows that may be computed, and rows that must be computed."""
    which = _run_of_each_row(runs, 0, n_tokens)
    which[-1] = 0
    first, blend = np.array([(0, 0), *((run.lo, run.blend) for run in runs)]).T
    rows = np.flatnonzero(blend[which])
    index = (rows, rows - first[which[rows]], np.flatnonzero(which == 0))
    chosen, offset, forced = (torch.from_numpy(part).to(device) for part in index)
    return Candidates(chosen, offset, forced, torch.from_numpy(which > 0), n_layers, ratio)


def _run_of_each_row(runs: Sequence[CachedRun], lo: int, hi: int) -> NDArray[np.int64]:
    """Return the number (1, 2, ...) of the run of each row in lo:hi; 0 for rows outside runs."""
    which = np.zeros(hi - lo, np.int64)
    for number, run in enumerate(runs, 1):
        which[run.lo - lo : run.hi - lo] = number
    return which


def bucket(count: int) -> int:
    """Round up a number of rows or keys, so that few different numbers occur.

    The result is a multiple of 16, and of p / 8 for the largest power of two p up to `count`.
    Attention back ends of accelerators compile or plan for each new shape. From 128 on, rounding
    adds less than an eighth.
    """
    step = max(16, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


class Fusion:
    """One fused prefill: chooses the rows to compute in each layer, and stores the computed KV.

    No value is ever read back from the device.

    Args:
        buffers: The KV buffers of the whole prompt.
        positions: int64 [T], the position of every row.
        candidates: The rows that may be recomputed.
        policy: Chooses the rows to recompute.
        pads: True to repeat the last row until the number of rows is a result of `bucket`. Used on
            accelerators.

    Attributes:
        rows: int64 [R], sorted: the rows computed in the current layer, followed by padding.
        n_padding: Number of padding rows in `rows`.
        chosen: int64, the candidate rows that were chosen in `Policy.check_layer`.
        counts: Number of candidates computed in each layer so far.
    """

    def __init__(
        self,
        buffers: Buffers,
        positions: Tensor,
        candidates: Candidates,
        policy: Policy,
        pads: bool = False,
    ) -> None:
        self.buffers, self.positions, self.policy, self.pads = buffers, positions, policy, pads
        self.candidates, device = candidates, positions.device
        padding = (
            torch.arange(1, buffers.n_keys - buffers.n_tokens + 1, device=device) + positions[-1]
        )
        self._key_positions = torch.cat([positions, padding])
        self._active = torch.arange(len(candidates), device=device)
        self._deviation: Tensor | None = None
        self.rows = self._merge()
        self.chosen = self.rows[:0]
        self.counts: list[int] = []
        self._mask: RowMask | None = None
        self._weights: tuple[Tensor, Tensor] | None = None

    def needs_check(self, layer: int) -> bool:
        """True if `check` must be called before `choose`, with this layer's KV of all `rows`."""
        return layer > 0 and layer == self.policy.check_layer and len(self._active) > 0

    def check(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Measure how far the computed KV [1, H, R, D] of `rows` is from the cached KV."""
        self._deviation = self._measure(layer, keys, values)

    def choose(self, layer: int) -> Tensor | None:
        """Choose the rows to compute in `layer`, and set `rows`.

        Returns:
            int64, index of each chosen row in the previous layer's `rows`. None if no row was
            dropped.
        """
        before, n_active = self.rows, len(self._active)
        if layer >= self.policy.check_layer and (n_active or layer == 0):
            deviation, self._deviation = self._deviation, None
            if deviation is not None:
                active = self.candidates.rows.index_select(0, self._active)
                deviation = deviation.index_select(0, torch.searchsorted(before, active))
            self._active = self.policy.choose(self.candidates, layer, self._active, deviation)
            if layer == self.policy.check_layer:
                self.chosen = self.candidates.rows.index_select(0, self._active)
        self.counts.append(len(self._active))
        if len(self._active) == n_active:
            return None
        self.rows, self._mask, self._weights = self._merge(), None, None
        return torch.searchsorted(before, self.rows)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the KV [1, H, R, D] of `rows`; return the whole prompt's keys and values."""
        n_active, follows = (
            len(self._active),
            self.policy.check_layer <= layer < len(self.buffers) - 1,
        )
        if follows and n_active and self.policy.thins(self.candidates, layer + 1, n_active):
            self._deviation = self._measure(layer, keys, values)
        if self._weights is None and 0 < n_active < len(self.candidates):
            self._weights = self._spread(keys.dtype)
        self.buffers.write(layer, self.rows, keys, values, self._weights)
        return self.buffers.get(layer)

    def _spread(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the weights [C, R] and [T + padding, C] for `Buffers.write`.

        Each row that is not computed gets the mean change of the computed rows in the row's chunk.
        The mean is shrunk towards 0 if few rows of the chunk are computed.
        """
        rows = self.candidates.rows
        chunk = torch.full_like(self._key_positions, -1).index_copy_(
            0, rows, rows - self.candidates.offset
        )
        starts = torch.tensor([run.lo for run in self.buffers.runs if run.blend])
        starts = starts.to(chunk.device)
        mean = chunk.index_select(0, self.rows) == starts[:, None]
        rows_of = (chunk[:, None] == starts).index_fill_(0, self.rows, False)
        mean = mean / (mean.sum(1, keepdim=True) + PRIOR_ROWS)
        return mean.to(dtype), rows_of.to(dtype)

    def keep_last(self) -> Tensor:
        """Drop all rows but the last row; return the previous index of the last row, int64 [1]."""
        last = torch.full((1,), len(self.rows) - 1, device=self.rows.device)
        self.rows, self.n_padding, self._mask = self.rows[-1:], 0, None
        return last

    def mask(self) -> RowMask:
        """Return the attention mask of `rows`. Layers with equal rows share the mask."""
        if self._mask is None:
            n_tokens = self.buffers.n_tokens
            is_all = (
                len(self.rows) == self.buffers.n_keys
                and len(self.rows) - self.n_padding == n_tokens
            )
            self._mask = RowMask(
                self.rows, self._key_positions, self.pads, n_tokens if is_all else 0
            )
        return self._mask

    @property
    def mean_ratio(self) -> float:
        """Share of the candidates that a layer computed, averaged over all layers from
        `Policy.check_layer` on.
        """
        counts, n_candidates = self.counts[self.policy.check_layer :], len(self.candidates)
        return sum(counts) / (len(counts) * n_candidates) if counts and n_candidates else 0.0

    def _merge(self) -> Tensor:
        """Return forced rows, active candidates and padding (the repeated last row), sorted."""
        active = self.candidates.rows.index_select(0, self._active)
        n_rows = len(active) + len(self.candidates.forced)
        self.n_padding = bucket(n_rows) - n_rows if self.pads else 0
        # the prompt's last row is always forced
        behind = self.candidates.forced[-1:].expand(self.n_padding)
        return torch.cat([self.candidates.forced, active, behind]).sort().values

    def _measure(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """Return the squared L2 distance of each row's fresh KV from the cached KV, float32 [R]."""
        total = torch.zeros(len(self.rows), device=self.rows.device)
        for new, old in zip((keys, values), self.buffers.get(layer), strict=True):
            change = new[0] - old[0].index_select(1, self.rows)
            total += vector_norm(change, dim=(0, 2), dtype=torch.float32).square_()
        return total
