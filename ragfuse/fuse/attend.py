"""Causal attention of a subset of a prompt's rows (the recomputed ones) over the keys of the whole prompt.

Each query row sees exactly the keys at positions up to its own (the released CacheBlend code masks a bottom-right
triangle instead). Queries are sorted and split into blocks; the keys of a block end at its last query, so most masked
scores are never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

QUERY_BLOCK = 64 if getattr(torch.cpu, "_is_amx_tile_supported", bool)() else 32
"""Query rows per block on a CPU; on an accelerator all rows form one block.

CPUs with matrix tiles (AMX) want larger products: with 64 rows 300 rows over 2,674 keys take 0.85 of the time with 32.
"""

FEW_SCORES = 250_000
"""Largest number of scores (heads x queries x keys) for which one call with a full mask is used instead of blocks.

Below it, one masked call is faster on a CPU than several calls on parts.
"""

KEY_TILE = 32
"""The number of keys in a block is rounded up to a multiple of this: CPU kernels are slower on ragged ends."""


KV = tuple[Tensor, Tensor]
"""Keys [B, H, n, D] and values [B, H, n, Dv]."""


@dataclass(frozen=True)
class Block:
    """A block of query rows and the range of keys that they can see.

    Args:
        lo: First query of the block, as an index into `RowMask.rows`.
        hi: The query after its last.
        key_lo: First key that any query of the block sees.
        clear: Keys key_lo:clear are seen by every query of the block and need no mask.
        key_hi: Keys clear:key_hi are seen by some queries only, as `mask` says.
        mask: Additive mask [hi - lo, key_hi - clear]; None if nothing is hidden (then `clear` equals `key_hi`).
    """

    lo: int
    hi: int
    key_lo: int
    clear: int
    key_hi: int
    mask: Tensor | None

    @property
    def whole_mask(self) -> Tensor | None:
        """The mask over all keys of the block, [hi - lo, key_hi - key_lo]."""
        return None if self.mask is None else pad(self.mask, (self.clear - self.key_lo, 0))


@dataclass(eq=False)
class RowMask:
    """The causal mask of some rows of a prompt over all its keys, built as blocks or as one tensor when needed.

    It is handed to the model in place of the attention mask, which the model passes through to `attend`.

    Args:
        rows: int64 [R], increasing: the prompt rows that are queries.
        positions: int64 [T], increasing: the position of every key.
        watch: Called before each layer's attention with (the layer's module, query [1, Hq, R, D], keys [1, H, T, D],
            scaling), if given.
    """

    rows: Tensor
    positions: Tensor
    watch: Callable[[object, Tensor, Tensor, float], None] | None = None
    _blocks: dict[tuple[int | None, torch.dtype], list[Block]] = field(default_factory=dict)
    _dense: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def is_suffix(self) -> bool:
        """Whether the rows are a contiguous suffix of the prompt that covers at least two thirds of it."""
        missing = len(self.positions) - len(self.rows)
        return 3 * missing <= len(self.positions) and int(self.rows[0]) == missing

    def dense(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Return the full additive mask [1, 1, R, T], built once and shared by all layers.

        Args:
            dtype: Of the mask.
            window: Size of the sliding window in tokens; None: every earlier key is seen.
        """
        if (window, dtype) not in self._dense:
            whole = self._additive(slice(None), slice(0, len(self.positions)), dtype, window)
            self._dense[window, dtype] = whole[None, None]
        return self._dense[window, dtype]

    def blocks(self, dtype: torch.dtype, window: int | None) -> list[Block]:
        """Return the query blocks for a sliding `window` (None: every earlier key is seen); all layers share them."""
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = list(self._cut(dtype, window))
        return self._blocks[window, dtype]

    def _cut(self, dtype: torch.dtype, window: int | None) -> Iterator[Block]:
        total = len(self.positions)
        if self.rows.device.type != "cpu":  # reading row indices would synchronise with the device
            yield Block(0, len(self.rows), 0, 0, total, self._additive(slice(None), slice(0, total), dtype, window))
            return
        rows = self.rows.tolist()
        for lo in range(0, len(rows), QUERY_BLOCK):
            hi = min(lo + QUERY_BLOCK, len(rows))
            key_lo, n_seen = self._oldest(rows[lo], window), rows[lo] + 1
            if hi - lo == 1:
                yield Block(lo, hi, key_lo, n_seen, n_seen, None)
                continue
            clear = key_lo if window is not None else n_seen // KEY_TILE * KEY_TILE
            key_hi = min(total, -(-(rows[hi - 1] + 1) // KEY_TILE) * KEY_TILE)
            hidden = self._additive(slice(lo, hi), slice(clear, key_hi), dtype, window)
            yield Block(lo, hi, key_lo, clear, key_hi, hidden)

    def _oldest(self, row: int, window: int | None) -> int:
        """Return the index of the first key that a row can see."""
        if window is None:
            return 0
        return int(torch.searchsorted(self.positions, self.positions[row] - window + 1))

    def _additive(self, rows: slice, keys: slice, dtype: torch.dtype, window: int | None) -> Tensor:
        """Return the additive mask of some rows over some keys.

        Positions increase, so a row must not see the keys after its own index. Every mask row is therefore a slice of
        one long step function; copying slices costs a quarter of comparing positions.
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
    """The KV of several prompts of which one token each is decoded in one batch.

    It is passed to the attention function as `attention_mask`, since prompts of different lengths do not fit into one
    tensor. Each new token attends to the tokens of its own prompt only.

    Args:
        sizes: Number of sequences of each prompt in the batch.
        kv_parts: KV [B, H, n, D] of each prompt in the current layer, as a list of parts in any order. Tensors that
            several prompts contain are a part that these share.
        newest: Keys [sum B, H, 1, D] of the new tokens. The batch's cache returns them in place of the whole KV, which
            is in `kv_parts`.
    """

    sizes: list[int]
    kv_parts: list[list[KV]] = field(default_factory=list)
    newest: Tensor | None = None


def attend_ragged(
    query: Tensor,
    ragged: Ragged,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output of the newest row of several prompts, each over the KV of its own prompt.

    Args:
        query: [sum B, Hq, 1, D].
        ragged: The KV of every prompt in this layer.
        scaling: Factor on the scores.
        window: Size of the sliding window in tokens, the newest included; only for prompts whose KV is one part.
        softcap: As in `attend`.
        sinks: As in `attend`.

    Returns:
        [sum B, 1, Hq, Dv].
    """
    queries, is_cpu = torch.split(query, ragged.sizes), query.device.type == "cpu"
    plain = softcap is None and sinks is None
    single_parts = [kv_parts[0] if len(kv_parts) == 1 else None for kv_parts in ragged.kv_parts]
    if None in single_parts and not (plain and is_cpu and _has_equal_widths(query, ragged.kv_parts)):
        single_parts = [_concatenated(kv_parts) for kv_parts in ragged.kv_parts]
    outputs: list[Tensor] = list(queries)
    several = [at for at, whole in enumerate(single_parts) if whole is None]
    merged = _attend_parts([queries[at] for at in several], [ragged.kv_parts[at] for at in several], scaling)
    for at, output in zip(several, merged, strict=True):
        outputs[at] = output
    for at, whole in enumerate(single_parts):
        if whole is not None:
            outputs[at] = _attend_newest(queries[at], *_last(window, *whole), scaling, softcap, sinks)
    return torch.cat(outputs).transpose(1, 2)


def _has_equal_widths(query: Tensor, kv_by_prompt: Sequence[Sequence[KV]]) -> bool:
    """Whether values are as wide as queries: the flash kernel, which also returns its softmax sums, requires it."""
    return all(values.shape[-1] == query.shape[-1] for _, values in kv_by_prompt[0])


def _concatenated(kv_parts: Sequence[KV]) -> KV:
    """Concatenate the parts of a prompt's KV; their order is irrelevant to a query that sees all rows."""
    keys, values = zip(*kv_parts, strict=True)
    return (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys, 2), torch.cat(values, 2))


def _attend_parts(queries: Sequence[Tensor], kv_by_prompt: Sequence[Sequence[KV]], scaling: float) -> list[Tensor]:
    """Return the output [B, Hq, 1, D] of each prompt's newest row over its KV parts; a shared part is read once.

    The outputs over the parts are merged by their softmax sums.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    readers: dict[int, tuple[KV, list[int]]] = {}
    for at, kv_parts in enumerate(kv_by_prompt):
        for kv in kv_parts:
            readers.setdefault(id(kv[0]), (kv, []))[1].append(at)
    outputs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in queries]
    for (keys, values), prompts in readers.values():
        folded = [queries[at].reshape(queries[at].shape[0], keys.shape[1], -1, queries[at].shape[3]) for at in prompts]
        out, sums = flash(torch.cat(folded, 2), keys, values, scale=scaling)
        n_rows = folded[0].shape[2]
        for at, output, its_sums in zip(prompts, out.split(n_rows, 2), sums.split(n_rows, 2), strict=True):
            outputs[at].append((output, its_sums))
    return [_merge_outputs(pieces).reshape(part.shape) for pieces, part in zip(outputs, queries, strict=True)]


def _merge_outputs(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge attention outputs [B, H, R, D] of the same queries over disjoint keys.

    Args:
        parts: (output, log of its softmax sum [B, H, R]) for each set of keys.
    """
    (out, sums), *rest = parts
    for more, more_sums in rest:
        out = torch.lerp(out, more, torch.sigmoid(more_sums - sums)[..., None].to(out.dtype))
        sums = torch.logaddexp(sums, more_sums)
    return out


def _last(window: int | None, keys: Tensor, values: Tensor) -> KV:
    """Return the keys and values that the newest row sees under a sliding window."""
    if window is None or window >= keys.shape[2]:
        return keys, values
    return keys[:, :, -window:], values[:, :, -window:]


def _attend_newest(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return [B, Hq, 1, Dv]. Query heads that share a key head are folded into it, so that its keys are read once."""
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
    """Return the attention output of some rows of a prompt over all its keys.

    Args:
        query: [B, Hq, R, D]; Hq is a multiple of H (grouped-query attention).
        keys: [B, H, T, D].
        values: [B, H, T, Dv].
        mask: Which rows the queries are, and the positions of all keys.
        scaling: Factor on the scores.
        window: Size of the sliding window in tokens; None: every earlier key is seen.
        softcap: If given, scores become softcap * tanh(score / softcap).
        sinks: [Hq], a logit per head that takes part in the softmax and contributes no value.

    Returns:
        [B, R, Hq, Dv].
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
    """Attend block by block: clear keys without a mask, the others with one, merged by their softmax sums.

    Most keys of a block are clear, and a mask costs a fifth of a kernel's time. Query heads that share a key head are
    folded into it first, so that its keys are packed once: [1, Hq, R, D] -> [1, H, R * groups, D].
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
    """Return the output [1, H, R * groups, D] of one block's folded queries."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts: list[tuple[Tensor, Tensor]] = []
    if block.clear > block.key_lo:
        seen = slice(block.key_lo, block.clear)
        parts.append(flash(query, keys[:, :, seen], values[:, :, seen], scale=scaling))
    if block.mask is not None:
        masked, mask = slice(block.clear, block.key_hi), block.mask.repeat_interleave(groups, 0)
        parts.append(flash(query, keys[:, :, masked], values[:, :, masked], attn_mask=mask, scale=scaling))
    return _merge_outputs(parts)


def _attend_suffix(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend with `is_causal`, zero queries in place of the few missing rows: faster than with a mask."""
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


def watch_rows(query: Tensor, keys: Tensor, mask: RowMask, which: Tensor, scaling: float, window: int | None) -> Tensor:
    """Return the attention weights of some queries over all keys, summed over heads and queries: float32 [T].

    Args:
        query: [1, Hq, R, D].
        keys: [1, H, T, D].
        mask: Which keys each of the R queries sees.
        which: int64 [n], indices of the queries among the R.
        scaling: Factor on the scores.
        window: Size of the layer's sliding window in tokens; None: every earlier key is seen.
    """
    heads, width = keys.shape[1], query.shape[-1]
    chosen = query[0].index_select(1, which).float()
    scores = chosen.reshape(heads, -1, width) @ keys[0].float().transpose(1, 2) * scaling
    seen = RowMask(mask.rows[which], mask.positions).dense(torch.float32, window)[0]
    scores = scores.view(chosen.shape[0], len(which), -1) + seen
    return torch.softmax(scores, -1).sum((0, 1))
