"""Rotary position embedding (RoPE): the only module that rotates keys. Also adds the drift.

A cached key is rotated for the key's position inside the chunk. Moving the chunk to position
`start` rotates the key by `start` more positions. This is one float32 rotation of a copy of the
stored key (CacheBlend 4.3, footnote 3, and appendix A). `ragfuse.hf.probe` measures on real weights
which dims of each layer are rotated, and how the dims are paired.

The drift is the mean difference between a chunk's KV in a real prompt and the chunk's KV encoded
after filler text, both before rotation. The drift has one value per layer, head and dim, is
measured once per model, and is added to a chunk's KV when the chunk is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout


def part_layout(layout: RopeLayout | None, part: str) -> RopeLayout | None:
    """Return `layout` if `layout` rotates `part` ("keys" or "values"), else None."""
    return layout if layout is not None and layout.part == part else None


def rotated_pairs(keys: Tensor, layout: RopeLayout) -> tuple[Tensor, Tensor]:
    """Return both members of each rotated pair, as views [..., len(inv_freq)] of keys [..., D]."""
    width = 2 * len(layout.inv_freq)
    part = keys[..., layout.lo : layout.lo + width]
    if layout.pairing == "interleaved":
        return part[..., 0::2], part[..., 1::2]
    return part[..., : width // 2], part[..., width // 2 :]


def angles(layout: RopeLayout, delta: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a rotation by `delta` positions, float32 [len(inv_freq)].

    Args:
        delta: One shift for all rows, or a shift for each row, float64 [n, 1]. With a shift for
            each row, both results are [n, len(inv_freq)].
        layout: The RoPE layout, with the frequency of each rotated pair in radians per position.
        device: The device of the results.
    """
    angle = torch.tensor(layout.inv_freq, dtype=torch.float64) * delta
    return angle.cos().float().to(device), angle.sin().float().to(device)


def place(
    keys: Tensor, shift: tuple[Tensor, Tensor], layout: RopeLayout, scratch: Tensor | None = None
) -> None:
    """Rotate `keys` in place by precomputed `angles`.

    Args:
        keys: [..., n, D].
        shift: cos and sin, as `angles` returns them.
        layout: Tells which dims are rotated, and how the dims are paired.
        scratch: float32 memory that is overwritten. Its size is at least 3 * n * len(inv_freq)
            numbers for each [n, D] slice of `keys`. None allocates new memory.
    """
    (cos, sin), pairs = shift, rotated_pairs(keys, layout)
    size = pairs[0].numel()
    if scratch is None:
        scratch = torch.empty(3 * size, dtype=torch.float32, device=keys.device)
    first, second, turned = scratch.flatten()[: 3 * size].view(3, *pairs[0].shape)
    first.copy_(pairs[0])
    second.copy_(pairs[1])
    pairs[0].copy_(torch.mul(first, cos, out=turned).addcmul_(second, sin, value=-1))
    pairs[1].copy_(torch.mul(second, cos, out=turned).addcmul_(first, sin))


def shifted(keys: Tensor, delta: int | Tensor, layout: RopeLayout | None) -> Tensor:
    """Return a copy of keys [..., n, D], rotated by `delta` positions (as in `angles`).

    If `layout` is None, keys carry no position, and the copy is not rotated.
    """
    out = keys.clone(memory_format=torch.contiguous_format)
    if layout is not None:
        place(out, angles(layout, delta, keys.device), layout)
    return out


def rotated(keys: Tensor, shift: tuple[Tensor, Tensor], layout: RopeLayout) -> Tensor:
    """Return a copy of keys rotated by precomputed `angles`, as `place` does, but differentiably.

    Args:
        keys: [..., n, D].
        shift: cos and sin, float32, broadcastable to [..., n, len(inv_freq)].
        layout: Tells which dims are rotated, and how the dims are paired.
    """
    cos, sin = shift
    first, second = (half.float() for half in rotated_pairs(keys, layout))
    pair = first * cos - second * sin, second * cos + first * sin
    width, lo = 2 * len(layout.inv_freq), layout.lo
    turned = (
        torch.stack(pair, -1).flatten(-2)
        if layout.pairing == "interleaved"
        else torch.cat(pair, -1)
    )
    return torch.cat((keys[..., :lo], turned.to(keys.dtype), keys[..., lo + width :]), -1)


def rotate_in_place(tensor: Tensor, layout: RopeLayout | None, sign: int) -> Tensor:
    """Rotate token i of a run of tokens by `sign * i` positions, in place; return the tensor.

    Sign -1 moves all keys to position 0. There, each channel varies less between tokens, so codecs
    compress the keys better. Sign 1 undoes this. The rotation is an isometry and adds no loss.

    Args:
        tensor: float32 [H, n, D], overwritten.
        layout: The RoPE layout. If None, nothing changes.
        sign: 1 or -1.
    """
    if layout is not None:
        positions = torch.arange(tensor.shape[1], dtype=torch.float64)[:, None] * sign
        place(tensor, angles(layout, positions, tensor.device), layout)
    return tensor


Rope = Sequence[RopeLayout | None]


def added(kv: ChunkKV, drift: ChunkKV, rope: Rope) -> ChunkKV:
    """Return the KV of a chunk with the drift added to every row.

    Args:
        kv: The chunk's KV, with keys at positions 0..n-1.
        drift: The drift measured by `training/drift.py`: one row per layer, at position 0.
        rope: The RoPE layout of each layer. None for a layer whose keys carry no position.
    """
    positions = torch.arange(kv.n_tokens, dtype=torch.float64)[:, None]

    def moved(part: Tensor, one: Tensor, layout: RopeLayout | None) -> Tensor:
        every = one.float().expand(-1, kv.n_tokens, -1)
        return (part.float() + shifted(every, positions, layout)).to(part)

    return ChunkKV(
        tuple(
            LayerKV(
                moved(layer.keys, one.keys, part_layout(layout, "keys")),
                moved(layer.values, one.values, part_layout(layout, "values")),
            )
            for layer, one, layout in zip(kv.layers, drift.layers, rope, strict=True)
        )
    )
