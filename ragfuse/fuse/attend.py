"""Causal attention of a prompt's computed rows (the queries) over the keys of the whole prompt.

Each query row sees exactly the keys at positions up to the query's own position. (The released
CacheBlend code masks a bottom-right triangle instead.) On an accelerator all rows go through one
kernel. On a CPU, or if the kernel does not support the case, attention is computed block by block
as two matrix products with a softmax between them. Queries are sorted, and a block's keys end at
the block's last query, so most masked scores are never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK, EXACT_BLOCK = 96, 32
"""Maximum number of query rows in a block, in bfloat16 and in float32. Larger blocks compute more
masked scores."""

WHOLE_BLOCK = 512
"""Query rows per block on an accelerator, where a block spans all keys. Limits the memory."""

KEY_TILE = 32
"""The number of keys of a block is rounded up to a multiple of `KEY_TILE`, for speed on a CPU."""

SHIFT_KEYS = 64
"""Maximum number of sampled keys from which `_largest` estimates the maximum score."""


MANY_KEYS = 512
"""From this many keys on, products are faster than the kernel for one bfloat16 row on a CPU."""

KV = tuple[Tensor, Tensor]
"""Keys [B, H, n, D] and values [B, H, n, Dv]."""


@dataclass(frozen=True)
class Block:
    """A block of query rows, the keys that these rows see, and memory for the scores.

    All layers share the block. Query heads that share a key head become separate rows of `scores`:
    query r of group g is row r * groups + g.

    Args:
        lo: Index of the block's first query in `RowMask.rows`.
        hi: Index of the block's last query plus 1.
        keys: The keys that at least one query of the block sees.
        past: Number of the first of `keys` that no query of the block precedes.
        scores: [H, (hi - lo) * groups, keys]. All blocks share this memory.
        tail: The masked part of the scores, a view [H, hi - lo, groups, masked keys].
        hidden: The additive mask of `tail`, [hi - lo, 1, masked keys].
    """

    lo: int
    hi: int
    keys: slice
    past: int
    scores: Tensor
    tail: Tensor
    hidden: Tensor


@dataclass(eq=False)
class Watch:
    """The attention that each key gets from chosen query rows, summed over heads, rows and layers.

    Args:
        weight: float32 [R]: 1 for rows whose attention is summed, 0 for all other rows.
        total: float32 [T]: the sum for each key so far.
        ends: True if the prefill stops after the current layer's attention.
    """

    weight: Tensor
    total: Tensor
    ends: bool = False
    _repeated: dict[tuple[int, int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def add(self, block: Block, weights: Tensor, groups: int) -> None:
        """Add the attention weights [H, rows * groups, keys] of a block to `total`."""
        kind = block.lo, len(weights), groups, weights.dtype
        if kind not in self._repeated:
            counts = self.weight[block.lo : block.hi].to(weights.dtype)
            self._repeated[kind] = counts.repeat_interleave(groups).repeat(len(weights))
        self.total[block.keys].add_(self._repeated[kind] @ weights.flatten(0, 1))


@dataclass(eq=False)
class RowMask:
    """The causal mask of some rows over all keys of a prompt, built when needed.

    The model gets the RowMask as attention mask and passes it on to `attend`. Layers that compute
    the same rows share one RowMask.

    Args:
        rows: int64 [R], sorted: the query rows. Only the last row may be repeated, as padding.
        positions: int64 [T], increasing: the positions of the keys.
        whole: True if each block spans all keys. Smaller blocks need the values of `rows` on the
            host, and reading them would wait for the accelerator.
        causal: The number of rows of the prompt if the kernel's causal mode can replace the mask,
            else 0. The causal mode requires that all rows are queries, and that queries and keys
            have equal padding.
        watch: The `Watch` that sums the current layer's attention, or None.
    """

    rows: Tensor
    positions: Tensor
    whole: bool = False
    causal: int = 0
    watch: Watch | None = None
    _blocks: dict[tuple[int | None, torch.dtype, int, int], list[Block]] = field(
        default_factory=dict
    )
    _dense: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def dense(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Return the additive mask [1, 1, R, T], cached. `window` None means no sliding window."""
        if (window, dtype) not in self._dense:
            whole = self._additive(slice(None), slice(0, len(self.positions)), dtype, window)
            self._dense[window, dtype] = whole[None, None]
        return self._dense[window, dtype]

    def blocks(
        self, dtype: torch.dtype, window: int | None, heads: int, groups: int
    ) -> list[Block]:
        """Return cached blocks for `heads` key heads; `groups` query heads share each key head."""
        kind = window, dtype, heads, groups
        if kind not in self._blocks:
            parts = list(self._cut(dtype, window))
            most = max(
                heads * (hi - lo) * groups * (keys.stop - keys.start) for lo, hi, keys, _ in parts
            )
            scratch = torch.empty(most, dtype=dtype, device=self.rows.device)
            self._blocks[kind] = []
            for lo, hi, keys, past in parts:
                n_rows, n_keys = hi - lo, keys.stop - keys.start
                clear = past if window is None else 0
                by_row = scratch[: heads * n_rows * groups * n_keys].view(
                    heads, n_rows, groups, n_keys
                )
                masked = slice(keys.start + clear, keys.stop)
                hidden = self._additive(slice(lo, hi), masked, dtype, window)[:, None]
                scores, tail = by_row.flatten(1, 2), by_row[..., clear:]
                self._blocks[kind].append(Block(lo, hi, keys, past, scores, tail, hidden))
        return self._blocks[kind]

    def _cut(self, dtype: torch.dtype, window: int | None) -> Iterator[tuple[int, int, slice, int]]:
        """Yield (lo, hi, keys, past) of each `Block`."""
        total, n_rows = len(self.positions), len(self.rows)
        if self.whole:
            for lo in range(0, n_rows, WHOLE_BLOCK):
                yield lo, min(lo + WHOLE_BLOCK, n_rows), slice(0, total), 0
            return
        rows, most = self.rows.tolist(), EXACT_BLOCK if dtype == torch.float32 else QUERY_BLOCK
        size = -(-n_rows // -(-n_rows // most))  # blocks of nearly equal size
        for lo in range(0, n_rows, size):
            hi = min(lo + size, n_rows)
            first = 0
            if window is not None:
                oldest = self.positions[rows[lo]] - window + 1
                first = int(torch.searchsorted(self.positions, oldest))
            last = min(total, -(-(rows[hi - 1] + 1) // KEY_TILE) * KEY_TILE)
            yield lo, hi, slice(first, last), max(0, rows[lo] // KEY_TILE * KEY_TILE - first)

    def _additive(self, rows: slice, keys: slice, dtype: torch.dtype, window: int | None) -> Tensor:
        """Return the additive mask of some rows over some keys, as slices of one step vector."""
        chosen, width = self.rows[rows], keys.stop - keys.start
        step = torch.zeros(len(self.positions) + width, dtype=dtype, device=chosen.device)
        step[len(self.positions) :] = torch.finfo(dtype).min
        out = step.unfold(0, width, 1).index_select(
            0, len(self.positions) - 1 - chosen + keys.start
        )
        if window is not None:
            at = self.positions[chosen, None]
            out.masked_fill_(self.positions[keys] <= at - window, torch.finfo(dtype).min)
        return out


@dataclass(eq=False)
class Ragged:
    """The KV of several prompts in a shared batch, where each prompt decodes one token.

    Prompts of different lengths do not fit into one tensor, so the attention function gets this
    object as `attention_mask`. Each new token attends only to the KV of the token's own prompt.

    Args:
        kv_parts: For each of P prompts, parts [1, H, n, D] of the prompt's KV in the current layer,
            in any order. Prompts with common KV share the tensors of a part.
        newest: Keys [P, H, 1, D] of the new tokens. The batch's cache returns only these keys to
            the model, because all keys are in `kv_parts`.
    """

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
    """Return the attention output of one new row per prompt, over the KV of the row's prompt.

    Args:
        query: [P, Hq, 1, D].
        ragged: The KV of every prompt in this layer.
        scaling: Factor on the scores.
        window: Sliding window in tokens, including the newest token. Supported only if the KV of
            each prompt is a single part.
        softcap: As in `attend`.
        sinks: As in `attend`.

    Returns:
        [P, 1, Hq, Dv].
    """
    if len(ragged.kv_parts) == len(ragged.kv_parts[0]) == 1:
        return _attend_newest(
            query, *_last(window, *ragged.kv_parts[0][0]), scaling, softcap, sinks
        ).transpose(1, 2)
    queries, is_cpu = torch.split(query, 1), query.device.type == "cpu"
    is_wide = all(values.shape[-1] == query.shape[-1] for _, values in ragged.kv_parts[0])
    # the flash kernel for CPUs has these requirements
    merges = is_cpu and is_wide and softcap is None and sinks is None
    held = ragged.kv_parts if merges else [[_concatenated(parts)] for parts in ragged.kv_parts]
    several = [(one, parts) for one, parts in zip(queries, held, strict=True) if len(parts) > 1]
    merged = iter(_attend_parts(several, scaling))
    outputs = [
        _attend_newest(one, *_last(window, *parts[0]), scaling, softcap, sinks)
        if len(parts) == 1
        else next(merged)
        for one, parts in zip(queries, held, strict=True)
    ]
    return torch.cat(outputs).transpose(1, 2)


def _concatenated(kv_parts: Sequence[KV]) -> KV:
    """Concatenate a prompt's KV parts. The order of parts does not matter without a mask."""
    keys, values = zip(*kv_parts, strict=True)
    return (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys, 2), torch.cat(values, 2))


def _attend_parts(prompts: Sequence[tuple[Tensor, Sequence[KV]]], scaling: float) -> list[Tensor]:
    """Return each prompt's output [1, Hq, 1, D]. A shared KV part is read once for all prompts."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    readers: dict[int, tuple[KV, list[int]]] = {}
    for at, (_, kv_parts) in enumerate(prompts):
        for kv in kv_parts:
            readers.setdefault(id(kv[0]), (kv, []))[1].append(at)
    outputs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
    for (keys, values), readers_of in readers.values():
        queries = [prompts[at][0] for at in readers_of]
        folded = [query.reshape(1, keys.shape[1], -1, query.shape[3]) for query in queries]
        out, sums = flash(torch.cat(folded, 2), keys, values, scale=scaling)
        n_rows = folded[0].shape[2]
        for at, output, its_sums in zip(
            readers_of, out.split(n_rows, 2), sums.split(n_rows, 2), strict=True
        ):
            outputs[at].append((output, its_sums))
    return [
        _merge_outputs(pieces).reshape(query.shape)
        for pieces, (query, _) in zip(outputs, prompts, strict=True)
    ]


def _merge_outputs(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge attention over disjoint keys. A part is (output [B, H, R, D], logsumexp [B, H, R])."""
    (out, sums), *rest = parts
    for more, more_sums in rest:
        out = torch.lerp(out, more, torch.sigmoid(more_sums - sums)[..., None].to(out.dtype))
        sums = torch.logaddexp(sums, more_sums)
    return out


def _last(window: int | None, keys: Tensor, values: Tensor) -> KV:
    if window is None or window >= keys.shape[2]:
        return keys, values
    return keys[:, :, -window:], values[:, :, -window:]


def _attend_newest(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention output [B, Hq, 1, Dv] of one query row that sees all keys.

    Query heads that share a key head become rows of one product, so each key is read once. This is
    6x faster on a CPU. With many keys, bfloat16 products take half as long as the kernel.
    """
    folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    if softcap is not None or sinks is not None:
        keys, values = keys.float(), values.float()
        scores = folded.float() @ keys.transpose(2, 3) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        column = (
            None
            if sinks is None
            else sinks.view(1, keys.shape[1], -1).expand(scores.shape[0], -1, -1)
        )
        done = (_softmax(scores, column) @ values).to(query.dtype)
    elif keys.device.type == "cpu" and keys.dtype == torch.bfloat16 and keys.shape[2] >= MANY_KEYS:
        done = _attend_in_buffers(folded, keys, values, scaling)
    else:
        done = scaled_dot_product_attention(folded, keys, values, scale=scaling)
    return done.reshape(*query.shape[:3], values.shape[3])


def _attend_in_buffers(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Return the attention output [B, H, groups, Dv] of queries that see all keys.

    Products use the whole buffers that begin with `keys` and `values`, because a product over part
    of a buffer would copy that part. Rows after the last key are finite; their scores are masked.
    Each query's scores are reduced by max(score of the first key, score of the newest key).
    """
    all_keys, all_values = (_buffer(part).flatten(0, 1) for part in (keys, values))
    folded, n_keys = query.flatten(0, 1), keys.shape[2]
    largest = _largest(folded, all_keys[:, : n_keys : n_keys - 1])
    scores = torch.baddbmm(largest, folded, all_keys.transpose(1, 2), beta=-scaling, alpha=scaling)
    scores[..., n_keys:].fill_(torch.finfo(scores.dtype).min)
    return torch.bmm(_softmax(scores, None), all_values).view(*query.shape[:3], -1)


def _buffer(rows: Tensor) -> Tensor:
    """Return the buffer [B, H, capacity, D] that begins with `rows`, or `rows` if there is none."""
    batch, heads, n_rows, width = rows.shape
    capacity = rows.stride(1) // width
    # a sliding window does not begin at the buffer's first row
    if rows.storage_offset() % max(1, rows.stride(1)):
        return rows
    strides = heads * capacity * width, capacity * width, width, 1
    if capacity <= n_rows or (
        rows.stride() != strides and (batch > 1 or rows.stride()[1:] != strides[1:])
    ):
        return rows
    return rows.as_strided((batch, heads, capacity, width), strides)


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
    """Return the attention output of some rows of a prompt over all keys of the prompt.

    Args:
        query: [1, Hq, R, D]; Hq is a multiple of H (grouped-query attention).
        keys: [1, H, T, D].
        values: [1, H, T, Dv].
        mask: The query rows, and the positions of all keys.
        scaling: Factor on the scores.
        window: Sliding window in tokens. If None, rows see all earlier keys.
        softcap: If not None, scores become softcap * tanh(score / softcap).
        sinks: [Hq], one logit per head, which takes part in the softmax but has no value row.

    Returns:
        [1, R, Hq, Dv].
    """
    if not mask.whole or softcap is not None or sinks is not None or mask.watch is not None:
        return _attend_products(query, keys, values, mask, scaling, window, softcap, sinks)
    n_rows = mask.causal if window is None else 0
    hidden = None if n_rows else mask.dense(query.dtype, window)
    done = scaled_dot_product_attention(
        query, keys, values, attn_mask=hidden, is_causal=n_rows > 0, scale=scaling, enable_gqa=True
    )
    if 0 < n_rows < query.shape[2]:
        # padding rows saw padding keys, so they get the output of the last prompt row
        done[:, :, n_rows:] = done[:, :, n_rows - 1 : n_rows]
    return done.transpose(1, 2)


def _attend_products(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: RowMask,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the result of `attend` block by block, with matrix products.

    On a CPU, bfloat16 products are 5x faster than the kernel, which computes in float32.
    """
    heads, n_rows, groups = keys.shape[1], query.shape[2], query.shape[1] // keys.shape[1]
    is_exact = query.dtype != torch.bfloat16 or softcap is not None or sinks is not None
    dtype = torch.float32 if is_exact else query.dtype
    folded = query.reshape(heads, groups, n_rows, -1).transpose(1, 2)
    keys, values = keys[0].to(dtype), values[0]
    out = values.new_empty(n_rows, heads, groups, values.shape[-1])
    for block in mask.blocks(dtype, window, heads, groups):
        # oneDNN's products copy a part of a larger tensor, and slowly if it is transposed
        part = folded[:, block.lo : block.hi].flatten(1, 2).to(dtype)
        seen, scores = keys[:, block.keys].contiguous(), block.scores
        shift, beta = scores, 0.0  # with beta 0, `baddbmm` ignores the values of `shift`
        if not is_exact:
            shift, beta = _largest(part, seen[:, : max(1, block.past)]), -scaling
        torch.baddbmm(shift, part, seen.transpose(1, 2), beta=beta, alpha=scaling, out=scores)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        block.tail.add_(block.hidden)
        weights = _softmax(
            scores,
            None if sinks is None else sinks.view(heads, groups).repeat(1, block.hi - block.lo),
        )
        if mask.watch is not None:
            mask.watch.add(block, weights, groups)
        done = torch.bmm(weights.to(values.dtype), values[:, block.keys])
        out[block.lo : block.hi] = done.view(heads, -1, *out.shape[2:]).transpose(0, 1)
    return out.view(1, n_rows, heads * groups, -1)


def _largest(query: Tensor, keys: Tensor) -> Tensor:
    """Return the approximate maximum product of each query with any key, [H, n, 1].

    Subtracting the maximum does not change a softmax, and brings bfloat16 scores near 0, where
    bfloat16 is most precise.

    Args:
        query: [H, n, D].
        keys: [H, K, D]. No key comes after a query, so later tokens do not change a row's output.
    """
    step = -(-keys.shape[1] // SHIFT_KEYS)
    products = torch.bmm(keys[:, ::step], query.transpose(1, 2))
    return products.amax(1).unsqueeze(-1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [..., n, K]; `sinks` [..., n] only add to the denominator."""
    if sinks is None:
        return torch.softmax(scores, -1, out=scores)
    return torch.softmax(torch.cat([scores, sinks[..., None].to(scores.dtype)], -1), -1)[..., :-1]
