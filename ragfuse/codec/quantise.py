"""Quantisation for CacheGen: most tokens as bin numbers per channel, outliers as 8-bit
codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ragfuse.codec.coders import MAX_NUMBER
from ragfuse.codec.tables import Channels, Floats, Ints

MAX_CODE: Final = 127
BIN_SCALE_DTYPE: Final = torch.bfloat16
OUTLIER_FACTOR: Final = 4.0
"""A token with a head this many times larger or smaller than usual is stored in 8 bits."""


@dataclass(frozen=True, slots=True)
class Split:
    """The tokens of a chunk, split into those stored in 8 bits and the rest.

    Args:
        exact: int64, the rows stored in 8 bits.
        rest: int64, all other rows.
    """

    exact: Tensor
    rest: Tensor

    @classmethod
    def of(cls, is_exact: Tensor) -> Split:
        """Split rows by which of them get 8 bits, bool `[n]`."""
        return cls(is_exact.nonzero()[:, 0], (~is_exact).nonzero()[:, 0])

    def joined(self, rest: Tensor, exact: Tensor) -> Tensor:
        """Return the rows `[H, n, D]` in their order."""
        order = torch.cat([self.rest, self.exact]).argsort()
        return torch.cat([rest, exact], 1).index_select(1, order) if len(self.exact) else rest


def outlier_tokens(tensor: Tensor, usual: Tensor) -> Tensor:
    """Find outlier tokens: bool `[n]`, those of `[H, n, D]` with a head much larger or smaller than
    the `usual` size of its channels, `[H, 1, D]`.
    """
    size = (tensor / usual).square().mean(-1).sqrt()
    return ((size > OUTLIER_FACTOR) | (size * OUTLIER_FACTOR < 1)).any(0)


def to_8bit(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[H, e, D]` to 8 bits: int8 codes of that shape, and bfloat16 scales per head and
    token `[H, e, 1]`.
    """
    scales = (tensor.abs().amax(-1, keepdim=True) / MAX_CODE).to(BIN_SCALE_DTYPE)
    by = scales.float()
    codes = (tensor / torch.where(by > 0, by, 1.0)).round().clamp(-MAX_CODE, MAX_CODE)
    return codes.to(torch.int8), scales


def from_8bit(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of 8-bit codes and their scales."""
    return codes.float() * scales.float()


def to_numbers(tensor: Tensor, part: Channels, width: float) -> Ints:
    """Quantise tokens to bin numbers.

    Args:
        tensor: Keys or values, float32 `[H, n, D]`.
        part: The profile of their channels.
        width: Width of a bin, in the channel's steps.

    Returns:
        int32 `[H * D, n]`: one row per channel.
    """
    above = tensor - torch.from_numpy(part.means)
    rows = above.mT.reshape(part.heads * part.dim, -1).numpy()
    bins = np.rint(rows / (part.steps * np.float32(width))[:, None])
    numbers: Ints = np.clip(bins, -MAX_NUMBER, MAX_NUMBER).astype(np.int32)
    return numbers


def from_numbers(rows: Floats, part: Channels, width: float) -> Tensor:
    """Invert `to_numbers`: float32 `[H, n, D]` from rows `[H * D, n]`."""
    bins = np.ascontiguousarray(rows.reshape(part.heads, part.dim, -1).transpose(0, 2, 1))
    steps = torch.from_numpy(part.steps * np.float32(width)).view(part.heads, 1, part.dim)
    return torch.addcmul(torch.from_numpy(part.means), torch.from_numpy(bins), steps)
