"""Attention of few queries, standing anywhere in a prompt, over all its keys.

A recomputed row sees exactly the keys at positions up to its own, wherever it stands among the queries (the released
CacheBlend code masks a bottom-right triangle instead). Sorted queries are taken in blocks, and each block's keys end
where its last query stands, so most of the masked part is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

BLOCK = 64
"""Queries per block on a CPU; an accelerator takes all rows at once."""

KEY_TILE = 32
"""Keys of a block are rounded up to a multiple of this: the kernels are slower on ragged ends."""


@dataclass(frozen=True)
class Block:
    """Queries lo:hi of the rows and the keys they can see. mask: additive [hi - lo, key_hi - key_lo], or None."""

    lo: int
    hi: int
    key_lo: int
    key_hi: int
    mask: Tensor | None


@dataclass(eq=False)
class RowMask:
    """Who sees whom: queries at `rows` of a prompt, keys at all T `positions`, both int64 and increasing.

    Stands where a model passes its attention mask through to its attention function. `watch`, if given, is called
    with (layer's module, query [1, Hq, R, D], keys [1, H, T, D], scaling) before each layer's attention.
    """

    rows: Tensor
    positions: Tensor
    watch: Callable[[object, Tensor, Tensor, float], None] | None = None
    _blocks: dict[tuple[int | None, torch.dtype], list[Block]] = field(default_factory=dict)

    @property
    def is_suffix(self) -> bool:
        """Whether the rows are all from some row to the prompt's end, and at least two thirds of it."""
        missing = len(self.positions) - len(self.rows)
        return 3 * missing <= len(self.positions) and int(self.rows[0]) == missing

    def dense(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The whole additive mask [1, 1, R, T] for models that apply a mask themselves."""
        return self._additive(slice(None), slice(0, len(self.positions)), dtype, window)[None, None]

    def blocks(self, dtype: torch.dtype, window: int | None) -> list[Block]:
        """The blocks for a sliding `window` (None: all earlier keys); built once and shared by the layers."""
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = list(self._cut(dtype, window))
        return self._blocks[window, dtype]

    def _cut(self, dtype: torch.dtype, window: int | None) -> Iterator[Block]:
        total = len(self.positions)
        if self.rows.device.type != "cpu":  # asking where rows stand would wait for the device
            yield Block(0, len(self.rows), 0, total, self._additive(slice(None), slice(0, total), dtype, window))
            return
        rows = self.rows.tolist()
        for lo in range(0, len(rows), BLOCK):
            hi = min(lo + BLOCK, len(rows))
            key_lo = self._oldest(rows[lo], window)
            if hi - lo == 1:
                yield Block(lo, hi, key_lo, rows[lo] + 1, None)
                continue
            key_hi = min(total, -(-(rows[hi - 1] + 1) // KEY_TILE) * KEY_TILE)
            yield Block(lo, hi, key_lo, key_hi, self._additive(slice(lo, hi), slice(key_lo, key_hi), dtype, window))

    def _oldest(self, row: int, window: int | None) -> int:
        """First key that the row can see."""
        if window is None:
            return 0
        return int(torch.searchsorted(self.positions, self.positions[row] - window + 1))

    def _additive(self, rows: slice, keys: slice, dtype: torch.dtype, window: int | None) -> Tensor:
        """Mask of some rows over some keys. Positions increase, so what a row must not see is what stands after it.

        Each row of it is a stretch of one long step: copied, which costs a quarter of comparing positions.
        """
        chosen, width = self.rows[rows], keys.stop - keys.start
        step = torch.zeros(len(self.positions) + width, dtype=dtype, device=chosen.device)
        step[len(self.positions) :] = torch.finfo(dtype).min
        out = step.unfold(0, width, 1).index_select(0, len(self.positions) - 1 - chosen + keys.start)
        if window is not None:
            at = self.positions[chosen, None]
            out.masked_fill_(self.positions[keys] <= at - window, torch.finfo(dtype).min)
        return out


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: RowMask,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [B, R, Hq, Dv] of query [B, Hq, R, D] over keys [B, H, T, D] and values [B, H, T, Dv].

    Hq is a multiple of H (grouped queries). softcap: scores become softcap * tanh(score / softcap). sinks [Hq]: a
    logit per head that takes part in the softmax and gives nothing.
    """
    if window is None and softcap is None and sinks is None and mask.is_suffix:
        return _attend_suffix(query, keys, values, scaling)
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])
    for block in mask.blocks(query.dtype, window):
        part = query[:, :, block.lo : block.hi]
        seen_keys, seen_values = keys[:, :, block.key_lo : block.key_hi], values[:, :, block.key_lo : block.key_hi]
        if softcap is None and sinks is None:
            done = scaled_dot_product_attention(
                part, seen_keys, seen_values, attn_mask=block.mask, scale=scaling, enable_gqa=True
            )
        else:
            done = _attend_plain(part, seen_keys, seen_values, block.mask, scaling, softcap, sinks)
        out[:, block.lo : block.hi] = done.transpose(1, 2)
    return out


def _attend_suffix(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """The whole triangle, empty queries standing for the few missing rows: sooner than under a mask."""
    missing = keys.shape[2] - query.shape[2]
    whole = pad(query, (0, 0, missing, 0))
    done = scaled_dot_product_attention(whole, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    return done[:, :, missing:].transpose(1, 2)


def _attend_plain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    groups = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores.float(), -1).to(query.dtype)[..., : keys.shape[2]]
    return weights @ values.repeat_interleave(groups, 1)


def watch_last(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention of the last query over all keys, summed over heads: float32 [T] from [1, Hq, R, D] and [1, H, T, D]."""
    heads = keys.shape[1]
    last = query[0, :, -1].reshape(heads, -1, query.shape[-1]).float()
    scores = last @ keys[0].float().transpose(1, 2) * scaling
    return torch.softmax(scores, -1).sum((0, 1))
