"""CacheGen's quantisation of KV to bin numbers, and the entropy coding of the bin numbers.

Most tokens become one bin number per channel; outlier tokens become 8-bit codes. A row is one
channel's bin numbers. Rows with a similar spread (standard deviation) form a class (`Section`),
which is compressed to one zstd frame with one Huffman table. A Huffman code takes at least one bit
per input byte. Two or three small numbers are therefore packed into one input byte, so that a
number can take less than one bit. Numbers too large for packing are stored separately, in order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from ragfuse.codec.tables import Channels, Floats, Ints

MAX_CODE: Final = 127
BIN_SCALE_DTYPE: Final = torch.bfloat16
OUTLIER_FACTOR: Final = 4.0
"""A token is an outlier if any head's values are this many times larger or smaller than usual."""


@dataclass(frozen=True, slots=True)
class Split:
    """The tokens of a chunk, split into tokens stored in 8 bits and all other tokens.

    Args:
        exact: int64, indices of the tokens stored in 8 bits.
        rest: int64, indices of all other tokens.
    """

    exact: Tensor
    rest: Tensor

    @classmethod
    def of(cls, is_exact: Tensor) -> Split:
        """Split n tokens. `is_exact`, bool `[n]`, is True for tokens stored in 8 bits."""
        return cls(is_exact.nonzero()[:, 0], (~is_exact).nonzero()[:, 0])

    def joined(self, rest: Tensor, exact: Tensor) -> Tensor:
        """Merge the KV of both parts, each `[H, tokens, D]`, in the order of the tokens."""
        order = torch.cat([self.rest, self.exact]).argsort()
        return torch.cat([rest, exact], 1).index_select(1, order) if len(self.exact) else rest


def outlier_tokens(tensor: Tensor, usual: Tensor) -> Tensor:
    """Return a mask of outlier tokens, bool `[n]`, in keys or values `[H, n, D]`.

    `OUTLIER_FACTOR` defines outliers. `usual`, `[H, 1, D]`, is the usual size of each channel.
    """
    size = (tensor / usual).square().mean(-1).sqrt()
    return ((size > OUTLIER_FACTOR) | (size * OUTLIER_FACTOR < 1)).any(0)


def to_8bit(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[H, e, D]` to int8 codes `[H, e, D]` and bfloat16 scales `[H, e, 1]`."""
    scales = (tensor.abs().amax(-1, keepdim=True) / MAX_CODE).to(BIN_SCALE_DTYPE)
    by = scales.float()
    codes = (tensor / torch.where(by > 0, by, 1.0)).round().clamp(-MAX_CODE, MAX_CODE)
    return codes.to(torch.int8), scales


def from_8bit(codes: Tensor, scales: Tensor) -> Tensor:
    """Return 8-bit codes times scales, in float32."""
    return codes.float() * scales.float()


def to_numbers(tensor: Tensor, part: Channels, width: float) -> Ints:
    """Quantise float32 `[H, n, D]` to bin numbers int32 `[H * D, n]`, in bins of `width` steps."""
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


Order = npt.NDArray[np.intp]

SINGLE: Final = 127
PAIR: Final = 7
TRIPLE: Final = 2
"""Maximum absolute number if a byte packs 1, 2 or 3. The maximum + 1 marks a larger number."""
PAIR_SPREAD: Final = 5
TRIPLE_SPREAD: Final = -6
"""Maximum spread code of classes packed in pairs (spread 1.5 bins) or triples (spread 0.6 bins)."""
VALUES_PER_SYMBOL: Final[Mapping[int, int]] = MappingProxyType({SINGLE: 1, PAIR: 2, TRIPLE: 3})
COARSEST: Final = -24
FINEST: Final = 64
"""Minimum and maximum spread code, for spreads of an eighth of a bin and of 256 bins."""
SECTION: Final = struct.Struct("<II")
MAX_NUMBER: Final = 1 << 30


def _unpack_table(max_number: int) -> Floats:
    """Return the bin numbers that each byte packs, float32 `[256, numbers per byte]`."""
    base, byte = 2 * max_number + 2, np.arange(256)
    found = np.stack(
        [byte // base**at % base for at in reversed(range(VALUES_PER_SYMBOL[max_number]))], axis=1
    )
    table = (found - max_number).astype(np.float32)
    table.setflags(write=False)
    return table


PAIRS: Final = _unpack_table(PAIR).view(np.uint64)[:, 0]
"""Both float32 numbers of each byte as one 64-bit word, so that one look-up finds both."""
TRIPLES: Final = _unpack_table(TRIPLE)


@dataclass(frozen=True, slots=True)
class Section:
    """A class of rows with a similar spread.

    Args:
        first: Index of the first row, after sorting.
        last: Index of the last row plus 1, after sorting.
        max_number: Maximum absolute bin number that is packed; larger numbers are stored
            separately.
    """

    first: int
    last: int
    max_number: int


def in_sections(codes: Ints, width: int) -> tuple[Order, tuple[Section, ...]]:
    """Sort rows into classes of `width` spread codes; return the row order and the classes.

    `codes`, int32 `[R]`, has the spread code of each row. A row with a spread of s bins has about
    the code `STEPS_PER_OCTAVE * log2(s)`.
    """
    classes = np.clip(codes, COARSEST, FINEST) // width
    order = np.argsort(classes, kind="stable")
    ends = [*np.flatnonzero(np.diff(classes[order])) + 1, len(order)]
    middles = [int(classes[order[end - 1]]) * width + width // 2 for end in ends]
    firsts = [0, *ends[:-1]]
    return order, tuple(
        Section(
            int(first),
            int(end),
            TRIPLE if middle <= TRIPLE_SPREAD else PAIR if middle <= PAIR_SPREAD else SINGLE,
        )
        for first, end, middle in zip(firsts, ends, middles, strict=True)
    )


def encode(numbers: Ints, order: Order, sections: Sequence[Section]) -> list[bytes]:
    """Encode rows int32 `[R, n]`; return the packed rows, and the bin numbers too large to pack."""
    numbers = numbers[order]
    marked, counts, large = [], [], []
    for section in sections:
        flat = numbers[section.first : section.last].reshape(-1)
        is_large = np.abs(flat) > section.max_number
        large.append(flat[is_large])
        counts.append(int(is_large.sum()))
        marked.append(np.where(is_large, section.max_number + 1, flat))
    frames = [_pack_symbols(flat, section) for flat, section in zip(marked, sections, strict=True)]
    heads = b"".join(
        SECTION.pack(len(frame), count) for frame, count in zip(frames, counts, strict=True)
    )
    all_large = np.concatenate(large)
    return [
        heads + b"".join(frames),
        _frame(all_large.astype("<i4").tobytes(), 4) if all_large.size else b"",
    ]


def decode(
    stream: memoryview,
    large: memoryview,
    order: Order,
    sections: Sequence[Section],
    n: int,
) -> Floats:
    """Invert `encode`: return the rows of bin numbers, float32 `[R, n]`."""
    decompressor, at = zstandard.ZstdDecompressor(), SECTION.size * len(sections)
    heads = [SECTION.unpack_from(stream, SECTION.size * number) for number in range(len(sections))]
    large_numbers = np.empty(0, dtype=np.int32)
    if large:
        large_numbers = np.frombuffer(decompressor.decompress(large), dtype="<i4")
    out, used = np.empty((sections[-1].last, n), dtype=np.float32), 0
    for section, (length, count) in zip(sections, heads, strict=True):
        flat = out[section.first : section.last].reshape(-1)
        data = np.frombuffer(decompressor.decompress(stream[at : at + length]), dtype=np.uint8)
        at += length
        if section.max_number == SINGLE:
            np.subtract(data, np.float32(SINGLE), out=flat)
        else:
            words = PAIRS[data] if section.max_number == PAIR else TRIPLES[data]
            flat[:] = words.view(np.float32).reshape(-1)[: len(flat)]
        if count:
            flat[flat == section.max_number + 1] = large_numbers[used : used + count]
            used += count
    rows = np.empty_like(out)
    rows[order] = out
    return rows


def _pack_symbols(flat: Ints, section: Section) -> bytes:
    n_together, base = VALUES_PER_SYMBOL[section.max_number], 2 * section.max_number + 2
    codes = (
        np.append(flat, [0] * (-len(flat) % n_together)).reshape(-1, n_together)
        + section.max_number
    )
    return _frame((codes @ base ** np.arange(n_together)[::-1]).astype(np.uint8).tobytes(), 1)


def _frame(data: bytes, width: int) -> bytes:
    """Compress into one zstd frame. If `width` is 1, avoid matches, because literals cost less."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=18,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        strategy=zstandard.STRATEGY_FAST,
    )
    compressor = (
        zstandard.ZstdCompressor(compression_params=parameters)
        if width == 1
        else zstandard.ZstdCompressor(3)
    )
    return compressor.compress(data)
