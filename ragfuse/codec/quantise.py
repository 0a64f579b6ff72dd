"""Quantisation for CacheGen: most tokens as bin numbers per channel, some tokens (anchors,
outliers) as 8-bit codes.
"""

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
    """The tokens of a chunk, split into those stored in 8 bits and the rest.

    Args:
        exact: int64, the rows stored in 8 bits.
        rest: int64, all other rows.
        order: int64, for each row its place in the concatenation of `rest` and `exact`.
        anchor: int64 `[rest]`, for each other row the place of its anchor in `exact`; None if no
            deltas are used.
    """

    exact: Tensor
    rest: Tensor
    order: Tensor
    anchor: Tensor | None

    @classmethod
    def of(cls, n: int, outliers: Tensor, deltas: bool) -> Split:
        """Split n rows: the `outliers` rows (int64) get 8 bits, and with `deltas` also the first of
        every group.
        """
        is_exact = torch.zeros(n, dtype=torch.bool)
        is_exact[outliers] = True
        if deltas:
            is_exact[::GROUP] = True
        exact, rest = is_exact.nonzero()[:, 0], (~is_exact).nonzero()[:, 0]
        order = torch.cat([rest, exact]).argsort()
        return cls(
            exact, rest, order, torch.searchsorted(exact, rest // GROUP * GROUP) if deltas else None
        )


def outlier_tokens(tensor: Tensor, part: Channels, factor: float) -> Tensor:
    """Find outlier tokens: bool `[n]`, those of `[H, n, D]` with a head `factor` times larger or
    smaller than usual.
    """
    size = (tensor / torch.from_numpy(part.rms)).square().mean(-1).sqrt()
    return ((size > factor) | (size * factor < 1)).any(0)


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


def to_numbers(tensor: Tensor, part: Channels, width: float, exact: Tensor, split: Split) -> Ints:
    """Quantise the tokens that are not stored in 8 bits to bin numbers.

    Args:
        tensor: Keys or values, float32 `[H, n, D]`.
        part: The profile of their channels.
        width: Width of a bin, in the channel's steps.
        exact: The 8-bit tokens as they will be decoded (`from_8bit`), float32 `[H, exact, D]`.
        split: Which tokens are stored in 8 bits.

    Returns:
        int32 `[H * D, rest]`: one row per channel.
    """
    above = tensor[:, split.rest] - _base(part, exact, split)
    rows = above.mT.reshape(part.heads * part.dim, -1).numpy()
    bins = np.rint(rows / (part.steps * np.float32(width))[:, None])
    numbers: Ints = np.clip(bins, -MAX_NUMBER, MAX_NUMBER).astype(np.int32)
    return numbers


def from_numbers(rows: Floats, part: Channels, width: float, exact: Tensor, split: Split) -> Tensor:
    """Invert `to_numbers`: float32 `[H, n, D]` from rows `[H * D, rest]`, and from `exact` for the
    8-bit tokens.
    """
    bins = np.ascontiguousarray(rows.reshape(part.heads, part.dim, -1).transpose(0, 2, 1))
    steps = torch.from_numpy(part.steps * np.float32(width)).view(part.heads, 1, part.dim)
    found = torch.addcmul(_base(part, exact, split), torch.from_numpy(bins), steps)
    return torch.cat([found, exact], 1).index_select(1, split.order) if len(split.exact) else found


def _base(part: Channels, exact: Tensor, split: Split) -> Tensor:
    """Return what is subtracted before quantising: the anchor as it will be decoded, or else the
    channel's mean.
    """
    return torch.from_numpy(part.means) if split.anchor is None else exact[:, split.anchor]
