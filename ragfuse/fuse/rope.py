"""Moving keys to another position by one rotation.

A cached key was rotated for its place inside the chunk; placing the chunk at `start` rotates it once more by `start`.
The rotation runs in float32 from the stored original, once, and never touches it (CacheBlend 4.3, footnote 3, and
appendix A). Which dims are rotated, and how they are paired, is found per layer on the real weights by the probe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragfuse.types.kv import RopeLayout


def halves(keys: Tensor, layout: RopeLayout) -> tuple[Tensor, Tensor]:
    """Both members of every rotated pair, as views [..., len(inv_freq)] of keys [..., D]."""
    width = 2 * len(layout.inv_freq)
    part = keys[..., layout.lo : layout.lo + width]
    if layout.pairing == "interleaved":
        return part[..., 0::2], part[..., 1::2]
    return part[..., : width // 2], part[..., width // 2 :]


def angles(layout: RopeLayout, delta: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of a move by `delta` positions, float32 [len(inv_freq)], from angles in float64.

    delta: one for all rows, or float64 [n, 1]; then both are [n, len(inv_freq)].
    """
    angle = torch.tensor(layout.inv_freq, dtype=torch.float64) * delta
    return angle.cos().float().to(device), angle.sin().float().to(device)


def place(out: Tensor, keys: Tensor, turn: tuple[Tensor, Tensor], layout: RopeLayout) -> None:
    """Write `keys`, turned by ready `angles`, into `out`, which may be `keys` itself; both [..., n, D], one dtype."""
    if out is not keys and 2 * len(layout.inv_freq) < keys.shape[-1]:
        out.copy_(keys)
    cos, sin = turn
    first, second = (half.to(torch.float32, copy=True) for half in halves(keys, layout))
    to_first, to_second = halves(out, layout)
    to_first.copy_(torch.addcmul(first * cos, second, sin, value=-1))
    to_second.copy_(torch.addcmul(second * cos, first, sin))


def moved(keys: Tensor, delta: int, layout: RopeLayout | None) -> Tensor:
    """A copy of keys [..., n, D] moved by `delta` positions; None: they carry no position."""
    out = keys.clone()
    if layout is not None and delta != 0:
        place(out, keys, angles(layout, delta, keys.device), layout)
    return out
