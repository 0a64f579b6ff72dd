"""Keys or values of a layer as whole numbers and back: rows of channels in bins of their steps; tokens in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ragfuse.codec.coders import MAX_NUMBER
from ragfuse.codec.tables import Channels, Floats, Ints

GROUP: Final = 10
"""Tokens that share an anchor (CacheGen 5.2)."""
MAX_CODE: Final = 127
BIN_SCALE_DTYPE: Final = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Split:
    """The tokens of a chunk: those in 8 bits, the others, and for each of these its anchor's place among the first.

    exact, rest: rows, int64. back: where every row stands among the rest and then the exact. owner: int64 [rest], or
    None where values are packed instead of changes.
    """

    exact: Tensor
    rest: Tensor
    back: Tensor
    owner: Tensor | None

    @classmethod
    def of(cls, n: int, odd: Tensor, deltas: bool) -> Split:
        """All `odd` rows (int64) of n stand in 8 bits, and with `deltas` the first of every group, too."""
        is_exact = torch.zeros(n, dtype=torch.bool)
        is_exact[odd] = True
        if deltas:
            is_exact[::GROUP] = True
        exact, rest = is_exact.nonzero()[:, 0], (~is_exact).nonzero()[:, 0]
        back = torch.cat([rest, exact]).argsort()
        return cls(exact, rest, back, torch.searchsorted(exact, rest // GROUP * GROUP) if deltas else None)


def odd_ones(tensor: Tensor, part: Channels, factor: float) -> Tensor:
    """bool [n]: tokens of [H, n, D] with a head `factor` times larger, or smaller, than it usually is."""
    size = (tensor / torch.from_numpy(part.usual)).square().mean(-1).sqrt()
    return ((size > factor) | (size * factor < 1)).any(0)


def to_eight(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of [H, e, D], and the scale of every head's token, bfloat16 [H, e, 1]."""
    scales = (tensor.abs().amax(-1, keepdim=True) / MAX_CODE).to(BIN_SCALE_DTYPE)
    by = scales.float()
    codes = (tensor / torch.where(by > 0, by, 1.0)).round().clamp(-MAX_CODE, MAX_CODE)
    return codes.to(torch.int8), scales


def from_eight(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 of both."""
    return codes.float() * scales.float()


def to_numbers(tensor: Tensor, part: Channels, width: float, held: Tensor, split: Split) -> Ints:
    """int32 [H * D, rest] of [H, n, D]: a row for each channel. held: what `from_eight` gives for the exact rows."""
    above = tensor[:, split.rest] - _base(part, held, split)
    rows = above.mT.reshape(part.heads * part.dim, -1).numpy()
    bins = np.rint(rows / (part.steps * np.float32(width))[:, None])
    numbers: Ints = np.clip(bins, -MAX_NUMBER, MAX_NUMBER).astype(np.int32)
    return numbers


def from_numbers(rows: Floats, part: Channels, width: float, held: Tensor, split: Split) -> Tensor:
    """float32 [H, n, D] of rows [H * D, rest], and of `held` where tokens are exact."""
    bins = np.ascontiguousarray(rows.reshape(part.heads, part.dim, -1).transpose(0, 2, 1))
    steps = torch.from_numpy(part.steps * np.float32(width)).view(part.heads, 1, part.dim)
    found = torch.addcmul(_base(part, held, split), torch.from_numpy(bins), steps)
    return torch.cat([found, held], 1).index_select(1, split.back) if len(split.exact) else found


def _base(part: Channels, held: Tensor, split: Split) -> Tensor:
    """What is taken off before quantising: the anchor as it will be read, else the channel's mean."""
    return torch.from_numpy(part.means) if split.owner is None else held[:, split.owner]
