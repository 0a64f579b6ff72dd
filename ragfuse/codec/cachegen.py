"""CacheGen's codec (its section 5.2): KV is quantised per channel, then entropy-coded with profiled
distributions.

Keys are first rotated back to position 0. Outlier tokens, such as the first of a text, are stored
in 8 bits. All other tokens are stored as differences to their channel's mean, in bins of the
level's width times the channel's step; `coders.py` packs these numbers. docs/guides/codec.md says
where this differs from the paper, and why.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ragfuse.codec import coders
from ragfuse.codec.codec import DTYPES, LayerMeta
from ragfuse.codec.coders import Order, Section
from ragfuse.codec.container import OtherTables, narrowed, pack, refuses_damage, unpack
from ragfuse.codec.quantise import (
    BIN_SCALE_DTYPE,
    Split,
    from_8bit,
    from_numbers,
    outlier_tokens,
    to_8bit,
    to_numbers,
)
from ragfuse.codec.tables import MIDDLE, STEPS_PER_OCTAVE, CodecTables, LayerTables
from ragfuse.fuse.rope import rotate_in_place
from ragfuse.types.kv import LayerKV
from ragfuse.types.levels import CodecLevel

CACHEGEN_KIND: Final = 2
LEVEL_FIELDS: Final = struct.Struct("<f12x")
OUTLIER_FACTOR: Final = 4.0
"""A token with a head this many times larger or smaller than usual is stored in 8 bits."""
WIDTHS: Final = ((256, 4), (64, 8), (0, 16))
"""(Minimum tokens, width of a class of rows): short chunks get fewer, wider classes, as each class
takes some bytes for its Huffman table.
"""


@dataclass(frozen=True, slots=True)
class CacheGenCodec:
    """The codec of one CacheGen level for one model.

    Args:
        tables: The codec tables of the model.
        level: The level.
    """

    tables: CodecTables
    level: CodecLevel

    @property
    def name(self) -> str:
        """Name of the level."""
        return self.level.name

    @property
    def width(self) -> float:
        """Width of a bin, rounded to float32 as it is stored."""
        return float(np.float32(self.level.width))

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Encode layer `at` to uint8 `[nbytes]` (`Codec.encode`).

        Raises:
            ValueError: The layer holds NaN or infinities.
        """
        layer_tables = self.tables.layers[at]
        tensors = [
            rotate_in_place(
                tensor.to("cpu", torch.float32, copy=True), layer_tables.rope_of(name), -1
            )
            for tensor, name in ((layer.keys, "keys"), (layer.values, "values"))
        ]
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise ValueError("The layer contains NaN or infinity, which only level raw can store.")
        outliers = self._outliers(tensors, layer_tables)
        split = Split.of(layer.n_tokens, outliers)
        exact = [to_8bit(tensor[:, split.exact]) for tensor in tensors]
        numbers = [
            to_numbers(tensor[:, split.rest], part, self.width)
            for tensor, part in zip(tensors, (layer_tables.keys, layer_tables.values), strict=True)
        ]
        parts = [
            outliers.to(torch.int32).numpy().astype("<u4").tobytes(),
            *(scales.contiguous().view(torch.int16).numpy().tobytes() for _, scales in exact),
            b"".join(codes.numpy().tobytes() for codes, _ in exact),
            *coders.encode(np.concatenate(numbers), *self._rows(layer_tables, layer.n_tokens)),
        ]
        packed = [torch.from_numpy(np.frombuffer(part, dtype=np.uint8).copy()) for part in parts]
        meta = LayerMeta.of(layer, torch.ones(1))
        blob = pack(
            CACHEGEN_KIND, at, self.tables.digest, meta, LEVEL_FIELDS.pack(self.width), packed
        )
        return blob.to(layer.keys.device)

    @refuses_damage
    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Decode a layer (`Codec.decode`); each number becomes the middle of its bin.

        Raises:
            OtherTables: It was encoded with other tables, at another level or with other bins.
            ValueError: It is damaged or of another shape.
        """
        packed = unpack(blob.cpu(), CACHEGEN_KIND, self.tables.digest, meta)
        if packed.codec_fields != LEVEL_FIELDS.pack(self.width):
            raise OtherTables(
                f"The layer was not encoded at level {self.name} with its present bins."
            )
        layer_tables = self.tables.layers[packed.at]
        keys, values = self._restored(packed.parts, layer_tables, meta)
        dtype = DTYPES[meta.dtype]
        keys = rotate_in_place(keys, layer_tables.rope_of("keys"), 1)
        values = rotate_in_place(values, layer_tables.rope_of("values"), 1)
        return LayerKV(
            narrowed(keys, dtype).to(blob.device), narrowed(values, dtype).to(blob.device)
        )

    def _restored(
        self, parts: Sequence[Tensor], layer_tables: LayerTables, meta: LayerMeta
    ) -> tuple[Tensor, Tensor]:
        """Return float32 keys and values, with the keys still rotated to position 0."""
        n, shares = meta.key_shape[1], (layer_tables.keys, layer_tables.values)
        outliers, *scales = parts[:3]
        at = np.frombuffer(outliers.contiguous().numpy().tobytes(), dtype="<u4").astype(np.int64)
        split = Split.of(n, torch.from_numpy(at))
        codes, stream, large = (
            memoryview(part.contiguous().numpy().tobytes()) for part in parts[3:]
        )
        flat = np.frombuffer(codes, dtype=np.int8).copy()
        order, sections = self._rows(layer_tables, n)
        rows = coders.decode(stream, large, order, sections, len(split.rest))
        cut, found = layer_tables.keys.heads * layer_tables.keys.dim, list[Tensor]()
        exact = np.split(flat, [cut * len(split.exact)])
        for part, own, scale, eight in zip(
            shares, (rows[:cut], rows[cut:]), scales, exact, strict=True
        ):
            code = torch.from_numpy(eight.reshape(part.heads, len(split.exact), part.dim))
            rest = from_numbers(own, part, self.width)
            found.append(split.joined(rest, from_8bit(code, _scales(scale, code.shape))))
        return found[0], found[1]

    def _outliers(self, tensors: Sequence[Tensor], layer_tables: LayerTables) -> Tensor:
        """Return the rows of outlier tokens, int64."""
        keys, values = (
            outlier_tokens(tensor, part, OUTLIER_FACTOR)
            for tensor, part in zip(tensors, (layer_tables.keys, layer_tables.values), strict=True)
        )
        return (keys | values).nonzero()[:, 0]

    def _rows(self, layer_tables: LayerTables, n: int) -> tuple[Order, tuple[Section, ...]]:
        """Return order and sections of a layer's rows, sorted by the spread of their bin
        numbers.
        """
        spreads = np.concatenate(
            [part.spreads for part in (layer_tables.keys, layer_tables.values)]
        )
        bins = round(STEPS_PER_OCTAVE * log2(self.width))
        width = next(width for min_tokens, width in WIDTHS if n >= min_tokens)
        return coders.in_sections(spreads - MIDDLE - bins, width)


def _scales(scales: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the scales of the 8-bit codes, bfloat16 `[H, count, 1]`."""
    numbers = np.frombuffer(scales.contiguous().numpy().tobytes(), dtype=np.int16)
    return torch.from_numpy(numbers.reshape(shape[0], shape[1], 1).copy()).view(BIN_SCALE_DTYPE)
