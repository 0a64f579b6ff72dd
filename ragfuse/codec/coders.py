"""Entropy coding of rows of whole numbers. Rows whose numbers have a similar spread form a class
and share one model.

Each class is a zstd frame of its own, whose literals zstd codes with one Huffman table. Small
numbers are packed two or three to a byte, so that less than one bit per number is possible. Numbers
that are too large for their class are stored separately, in order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from ragfuse.codec.tables import Floats, Ints

Order = npt.NDArray[np.intp]

SINGLE: Final = 127
PAIR: Final = 7
TRIPLE: Final = 2
"""Largest absolute number for one, two or three numbers per byte; one more value marks a larger
number.
"""
PAIR_SPREAD: Final = 5
TRIPLE_SPREAD: Final = -6
"""Largest codes of a spread (1.5 and 0.6 bins) at which numbers are packed in pairs and in triples.
"""
VALUES_PER_SYMBOL: Final[Mapping[int, int]] = MappingProxyType({SINGLE: 1, PAIR: 2, TRIPLE: 3})
COARSEST: Final = -24
FINEST: Final = 64
"""Codes of spreads are clipped to these: an eighth of a bin, where nearly all numbers are 0, and
256 bins.
"""
SECTION: Final = struct.Struct("<II")
MAX_NUMBER: Final = 1 << 30


def _unpack_table(max_number: int) -> Floats:
    """Return the numbers (up to `max_number`) that each byte stands for, float32 `[256, numbers per
    byte]`.
    """
    base, byte = 2 * max_number + 2, np.arange(256)
    found = np.stack(
        [byte // base**at % base for at in reversed(range(VALUES_PER_SYMBOL[max_number]))], axis=1
    )
    table = (found - max_number).astype(np.float32)
    table.setflags(write=False)
    return table


PAIRS: Final = _unpack_table(PAIR).view(np.uint64)[:, 0]
"""Both numbers of a byte as one 64-bit word, which is faster to look up than two."""
TRIPLES: Final = _unpack_table(TRIPLE)


@dataclass(frozen=True, slots=True)
class Section:
    """One class of rows.

    Args:
        first: The first row, in sorted order.
        last: The row after the last one.
        max_number: Largest absolute number that is not stored separately.
    """

    first: int
    last: int
    max_number: int


def in_sections(codes: Ints, width: int) -> tuple[Order, tuple[Section, ...]]:
    """Sort rows into classes of similar spread.

    Args:
        codes: int32 `[R]`, code of the spread of each row.
        width: How many codes form a class.

    Returns:
        The sorted order of the rows, and the classes as sections of it.
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
    """Encode rows of numbers.

    Args:
        numbers: int32 `[R, n]`.
        order: The sorted order of the rows, from `in_sections`.
        sections: Their classes.

    Returns:
        Two byte strings: the stream, and the large numbers that are stored separately.
    """
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
    """Invert `encode`.

    Returns:
        float32 `[R, n]`.
    """
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
    """Compress into one frame, with hardly any search for matches: chance matches cost more than
    their literals.
    """
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
