"""Attention of few queries, standing anywhere in a prompt, over all its keys.

A recomputed row sees exactly the keys at positions up to its own, wherever it stands among the queries (the released
CacheBlend code masks a bottom-right triangle instead). Sorted queries are taken in blocks, and each block's keys end
where its last query stands, so most of the masked part is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

QUERY_BLOCK = 64
"""Queries per block on a CPU; an accelerator takes all rows at once."""

FEW_SCORES = 2_000_000
"""Up to so many scores (heads x queries x keys), one call under a whole mask beats several calls on parts on a CPU."""

KEY_TILE = 32
"""Keys of a block are rounded up to a multiple of this: the kernels are slower on ragged ends."""


KV = tuple[Tensor, Tensor]
"""Keys [B, H, n, D] and values [B, H, n, Dv]."""


@dataclass(frozen=True)
class Block:
    """Queries lo:hi of the rows and the keys they can see: key_lo:clear all of them, clear:key_hi each under its mask.

    mask: additive [hi - lo, key_hi - clear]; None where there is nothing to hide, and clear is key_hi.
    """

    lo: int
    hi: int
    key_lo: int
    clear: int
    key_hi: int
    mask: Tensor | None

    @property
    def whole_mask(self) -> Tensor | None:
        """The mask over all of its keys, [hi - lo, key_hi - key_lo]."""
        return None if self.mask is None else pad(self.mask, (self.clear - self.key_lo, 0))


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
    _dense: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def is_suffix(self) -> bool:
        """Whether the rows are all from some row to the prompt's end, and at least two thirds of it."""
        missing = len(self.positions) - len(self.rows)
        return 3 * missing <= len(self.positions) and int(self.rows[0]) == missing

    def dense(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The whole additive mask [1, 1, R, T]; made once and shared by the layers."""
        if (window, dtype) not in self._dense:
            whole = self._additive(slice(None), slice(0, len(self.positions)), dtype, window)
            self._dense[window, dtype] = whole[None, None]
        return self._dense[window, dtype]

    def blocks(self, dtype: torch.dtype, window: int | None) -> list[Block]:
        """The blocks for a sliding `window` (None: all earlier keys); built once and shared by the layers."""
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = list(self._cut(dtype, window))
        return self._blocks[window, dtype]

    def _cut(self, dtype: torch.dtype, window: int | None) -> Iterator[Block]:
        total = len(self.positions)
        if self.rows.device.type != "cpu":  # asking where rows stand would wait for the device
            yield Block(0, len(self.rows), 0, 0, total, self._additive(slice(None), slice(0, total), dtype, window))
            return
        rows = self.rows.tolist()
        for lo in range(0, len(rows), QUERY_BLOCK):
            hi = min(lo + QUERY_BLOCK, len(rows))
            key_lo, seen = self._oldest(rows[lo], window), rows[lo] + 1
            if hi - lo == 1:
                yield Block(lo, hi, key_lo, seen, seen, None)
                continue
            clear = key_lo if window is not None else seen // KEY_TILE * KEY_TILE
            key_hi = min(total, -(-(rows[hi - 1] + 1) // KEY_TILE) * KEY_TILE)
            hidden = self._additive(slice(lo, hi), slice(clear, key_hi), dtype, window)
            yield Block(lo, hi, key_lo, clear, key_hi, hidden)

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


@dataclass(eq=False)
class Ragged:
    """Several prompts of which the newest row is computed together, in place of a mask: it sees all rows of its own.

    sizes: rows of the batch that each has. held: KV [B, H, n, D] of each, of the layer at hand, in stretches, in any
    order: the same tensors, in several prompts, are one stretch that they share. newest: keys [sum B, H, 1, D] of the
    newest rows there, which a cache gives back in place of all.
    """

    sizes: list[int]
    held: list[list[KV]] = field(default_factory=list)
    newest: Tensor | None = None


def attend_ragged(
    query: Tensor,
    ragged: Ragged,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [sum B, 1, Hq, Dv] of the newest rows [sum B, Hq, 1, D], each over its own prompt's KV.

    window: rows that are seen, its own among them: of a prompt of one stretch. softcap and sinks as for `attend`.
    """
    parts, plain = torch.split(query, ragged.sizes), softcap is None and sinks is None
    alone = [stretches[0] if len(stretches) == 1 else None for stretches in ragged.held]
    if None in alone and not (plain and query.device.type == "cpu" and _is_even(query, ragged.held)):
        alone = [_together(stretches) for stretches in ragged.held]
    done: list[Tensor] = list(parts)
    several = [at for at, whole in enumerate(alone) if whole is None]
    found = _attend_stretches([parts[at] for at in several], [ragged.held[at] for at in several], scaling)
    for at, output in zip(several, found, strict=True):
        done[at] = output
    for at, whole in enumerate(alone):
        if whole is not None:
            done[at] = _attend_newest(parts[at], *_last(window, *whole), scaling, softcap, sinks)
    return torch.cat(done).transpose(1, 2)


def _is_even(query: Tensor, held: Sequence[Sequence[KV]]) -> bool:
    """Whether values are as wide as queries, as the kernel wants that gives the sums of its softmax."""
    return all(values.shape[-1] == query.shape[-1] for _, values in held[0])


def _together(stretches: Sequence[KV]) -> KV:
    """All rows of a prompt, in the order of its stretches, which a query that sees all does not mind."""
    keys, values = zip(*stretches, strict=True)
    return (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys, 2), torch.cat(values, 2))


def _attend_stretches(parts: Sequence[Tensor], held: Sequence[Sequence[KV]], scaling: float) -> list[Tensor]:
    """Output [B, Hq, 1, D] of each prompt's newest row over its stretches; one that several share is read once.

    What a row finds in its stretches is put together by the sums of their softmax.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    readers: dict[int, tuple[KV, list[int]]] = {}
    for at, stretches in enumerate(held):
        for kv in stretches:
            readers.setdefault(id(kv[0]), (kv, []))[1].append(at)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parts]
    for (keys, values), who in readers.values():
        asked = [parts[at].reshape(parts[at].shape[0], keys.shape[1], -1, parts[at].shape[3]) for at in who]
        out, sums = flash(torch.cat(asked, 2), keys, values, scale=scaling)
        each = asked[0].shape[2]
        for at, some, its_sums in zip(who, out.split(each, 2), sums.split(each, 2), strict=True):
            found[at].append((some, its_sums))
    return [_joined(pieces).reshape(part.shape) for pieces, part in zip(found, parts, strict=True)]


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """What the same queries [B, H, R, D] find over several stretches of keys, by the logs of their sums [B, H, R]."""
    (out, sums), *rest = parts
    for more, more_sums in rest:
        out = torch.lerp(out, more, torch.sigmoid(more_sums - sums)[..., None].to(out.dtype))
        sums = torch.logaddexp(sums, more_sums)
    return out


def _last(window: int | None, keys: Tensor, values: Tensor) -> KV:
    """What a newest row sees."""
    if window is None or window >= keys.shape[2]:
        return keys, values
    return keys[:, :, -window:], values[:, :, -window:]


def _attend_newest(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Output [B, Hq, 1, Dv]; queries that share keys are folded into one head, so that keys are read once for them."""
    if softcap is not None or sinks is not None:
        return _attend_plain(query, keys, values, None, scaling, softcap, sinks)
    folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    done = scaled_dot_product_attention(folded, keys, values, scale=scaling)
    return done.reshape(*query.shape[:3], values.shape[3])


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
    plain = softcap is None and sinks is None
    if plain and query.shape[1:3].numel() * keys.shape[2] <= FEW_SCORES:
        whole = mask.dense(query.dtype, window)
        few = scaled_dot_product_attention(query, keys, values, attn_mask=whole, scale=scaling, enable_gqa=True)
        return few.transpose(1, 2)
    blocks = mask.blocks(query.dtype, window)
    if plain and query.device.type == "cpu" and query.shape[-1] == values.shape[-1]:
        return _attend_split(query, keys, values, blocks, scaling)
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])
    for block in blocks:
        part, hidden = query[:, :, block.lo : block.hi], block.whole_mask
        seen_keys, seen_values = keys[:, :, block.key_lo : block.key_hi], values[:, :, block.key_lo : block.key_hi]
        if plain:
            done = scaled_dot_product_attention(
                part, seen_keys, seen_values, attn_mask=hidden, scale=scaling, enable_gqa=True
            )
        else:
            done = _attend_plain(part, seen_keys, seen_values, hidden, scaling, softcap, sinks)
        out[:, block.lo : block.hi] = done.transpose(1, 2)
    return out


def _attend_split(query: Tensor, keys: Tensor, values: Tensor, blocks: Sequence[Block], scaling: float) -> Tensor:
    """Each block's clear keys without a mask, the others under it, put together by their softmax sums.

    Most keys of a block are clear, and a mask costs a fifth of a kernel's time. The queries that share keys are folded
    into one head first, so that keys are packed for them once: [1, Hq, R, D] -> [1, H, R * groups, D].
    """
    (batch, heads, _, size), rows = keys.shape, query.shape[2]
    groups = query.shape[1] // heads
    folded = query.reshape(batch, heads, groups, rows, size).transpose(2, 3).flatten(2, 3)
    done = [
        _attend_block(folded[:, :, block.lo * groups : block.hi * groups], keys, values, block, groups, scaling)
        for block in blocks
    ]
    out = torch.cat(done, 2).reshape(batch, heads, rows, groups, size)
    return out.permute(0, 2, 1, 3, 4).flatten(2, 3)


def _attend_block(query: Tensor, keys: Tensor, values: Tensor, block: Block, groups: int, scaling: float) -> Tensor:
    """Output [1, H, R * groups, D] of one block's folded queries."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts: list[tuple[Tensor, Tensor]] = []
    if block.clear > block.key_lo:
        seen = slice(block.key_lo, block.clear)
        parts.append(flash(query, keys[:, :, seen], values[:, :, seen], scale=scaling))
    if block.mask is not None:
        some, mask = slice(block.clear, block.key_hi), block.mask.repeat_interleave(groups, 0)
        parts.append(flash(query, keys[:, :, some], values[:, :, some], attn_mask=mask, scale=scaling))
    return _joined(parts)


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
