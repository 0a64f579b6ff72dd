"""Attention of few queries, standing anywhere in a prompt, over all its keys.

Causality is by position, never by index: a recomputed row sees exactly the keys before it (the released CacheBlend code
masks a bottom-right triangle instead). Sorted queries are taken in blocks, and each block's keys end where its last
query stands, so most of the masked part is never computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def block_size(rows: Tensor, dtype: torch.dtype) -> int:
    """Queries per block: 64 (float32) or 96 measured best on CPU; an accelerator takes all rows at once."""
    if rows.device.type != "cpu":
        return max(len(rows), 1)
    return 64 if dtype == torch.float32 else 96


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

    def dense(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The whole additive mask [1, 1, R, T] for models that apply a mask themselves."""
        return _mask(self.positions[self.rows], self.positions, dtype, window)[None, None]

    def blocks(self, dtype: torch.dtype, window: int | None) -> list[Block]:
        """The blocks for a sliding `window` (None: all earlier keys); built once and shared by the layers."""
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = list(self._cut(dtype, window))
        return self._blocks[window, dtype]

    def _cut(self, dtype: torch.dtype, window: int | None) -> list[Block]:
        size = block_size(self.rows, dtype)
        at = self.positions[self.rows]
        firsts = at[::size]
        lasts = at[torch.arange(len(firsts), device=at.device).mul(size).add(size - 1).clamp(max=len(at) - 1)]
        key_his = torch.searchsorted(self.positions, lasts, right=True).tolist()
        oldest = firsts - window + 1 if window else torch.full_like(firsts, torch.iinfo(torch.int64).min)
        key_los = torch.searchsorted(self.positions, oldest).tolist()
        blocks = []
        for index, (key_lo, key_hi) in enumerate(zip(key_los, key_his, strict=True)):
            lo, hi = index * size, min((index + 1) * size, len(at))
            mask = _mask(at[lo:hi], self.positions[key_lo:key_hi], dtype, window) if hi - lo > 1 else None
            blocks.append(Block(lo, hi, key_lo, key_hi, mask))
        return blocks


def _mask(queries: Tensor, keys: Tensor, dtype: torch.dtype, window: int | None) -> Tensor:
    """Additive [R, T]; without a window only the keys behind the first query are compared at all."""
    out = torch.zeros(len(queries), len(keys), dtype=dtype, device=keys.device)
    seen_by_all = 0 if window else int(torch.searchsorted(keys, queries[:1]))
    queries, keys = queries[:, None].int(), keys[seen_by_all:].int()
    hidden = keys > queries
    if window:
        hidden |= keys <= queries - window
    out[:, seen_by_all:].masked_fill_(hidden, torch.finfo(dtype).min)
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
