"""Keys turned back to position 0 before they are packed, and forth again after: channels are steadier there.

A rotation mixes every pair of channels by an angle that grows with the token, and blurs what a channel's mean and
spread are. The rotation is an isometry, so it adds no loss of its own. (`fuse.rope` moves keys that are to be used.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragfuse.types.kv import RopeLayout


def turned(tensor: Tensor, layout: RopeLayout | None, by: int) -> Tensor:
    """float32 [H, n, D] whose token i is moved by `by * i` positions (1 or -1): written into `tensor`."""
    if layout is None:
        return tensor
    angle = torch.arange(tensor.shape[1], dtype=torch.float64)[:, None] * torch.tensor(layout.inv_freq).double() * by
    cos, sin = angle.cos().float(), angle.sin().float()
    first, second = halves(tensor, layout)
    kept = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(kept, sin)
    return tensor


def halves(tensor: Tensor, layout: RopeLayout) -> tuple[Tensor, Tensor]:
    """Both members of every rotated pair, as views [..., len(inv_freq)] of [..., D]."""
    half = len(layout.inv_freq)
    part = tensor[..., layout.lo : layout.lo + 2 * half]
    if layout.pairing == "interleaved":
        return part[..., 0::2], part[..., 1::2]
    return part[..., :half], part[..., half:]
