"""CacheGen's codec (its section 5.2): KV is quantised per channel, then entropy-coded with profiled
distributions.

Keys are first rotated back to position 0. Outlier tokens, such as the first of a text, are stored
in 8 bits; so are the anchors (one of every ten tokens) if a level uses deltas as the paper does.
All other tokens are stored as differences to their channel's mean, or to their anchor, in bins of
the level's width times the channel's step; `coders.py` packs these numbers. docs/guides/codec.md
has measurements of each of these choices.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod
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
from ragfuse.codec.tables import MIDDLE, STEPS_PER_OCTAVE, CodecTables, LayerTables, What
from ragfuse.fuse.rope import rotate_in_place
from ragfuse.types.kv import LayerKV

CACHEGEN_KIND: Final = 2
LEVEL_FIELDS: Final = struct.Struct("<fB11x")
WIDTHS: Final = ((256, 4), (64, 8), (0, 16))
"""(Minimum tokens, width of a class of rows): short chunks get fewer, wider classes, as each class
takes some bytes for its Huffman table.
"""


@dataclass(frozen=True, slots=True)
class Level:
    """A CacheGen level: how much it loses, and which of the paper's ideas it uses.

    Args:
        name: Name of the level.
        bins: Widths of the bins in the first, middle and last third of the layers, in steps of each
            channel; by default those of the paper (its C.2).
        deltas: Whether tokens are stored as differences to an anchor instead of to the channel's
            mean.
        layerwise: Whether `bins` differ by layer; if not, all layers use the middle width.
        outlier_factor: A token with a head this many times larger or smaller than usual is stored
            in 8 bits; 0: no token is.
    """

    name: str
    bins: tuple[float, float, float] = (0.5, 1.0, 1.5)
    deltas: bool = False
    layerwise: bool = True
    outlier_factor: float = 4.0

    def width(self, at: int, n_layers: int) -> float:
        """Return the width of a bin in layer `at`, rounded to float32 as it is stored."""
        return float(np.float32(self.bins[min(2, 3 * at // n_layers) if self.layerwise else 1]))


@dataclass(frozen=True, slots=True)
class CacheGenCodec:
    """The codec of one CacheGen level for one model.

    Args:
        tables: The codec tables of the model.
        level: The level.
    """

    tables: CodecTables
    level: Level

    @property
    def name(self) -> str:
        """Name of the level."""
        return self.level.name

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
        split = Split.of(layer.n_tokens, outliers, self.level.deltas)
        exact = [to_8bit(tensor[:, split.exact]) for tensor in tensors]
        numbers = [
            to_numbers(
                tensor,
                part,
                self.level.width(at, len(self.tables.layers)),
                from_8bit(*codes_and_scales),
                split,
            )
            for tensor, part, codes_and_scales in zip(
                tensors, (layer_tables.keys, layer_tables.values), exact, strict=True
            )
        ]
        parts = [
            outliers.to(torch.int32).numpy().astype("<u4").tobytes(),
            *(scales.contiguous().view(torch.int16).numpy().tobytes() for _, scales in exact),
            *self._pack_exact([codes for codes, _ in exact], layer_tables),
            *coders.encode(
                np.concatenate(numbers), *self._for_rest(layer_tables, at, layer.n_tokens)
            ),
        ]
        packed = [torch.from_numpy(np.frombuffer(part, dtype=np.uint8).copy()) for part in parts]
        meta = LayerMeta.of(layer, torch.ones(1))
        blob = pack(CACHEGEN_KIND, at, self.tables.digest, meta, self._level_fields(at), packed)
        return blob.to(layer.keys.device)

    @refuses_damage
    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Decode a layer (`Codec.decode`); each number becomes the middle of its bin.

        Raises:
            OtherTables: It was encoded with other tables, at another level or with other bins.
            ValueError: It is damaged or of another shape.
        """
        packed = unpack(blob.cpu(), CACHEGEN_KIND, self.tables.digest, meta)
        if packed.codec_fields != self._level_fields(packed.at):
            raise OtherTables(
                f"The layer was not encoded at level {self.name} with its present bins."
            )
        layer_tables = self.tables.layers[packed.at]
        keys, values = self._restored(packed.parts, layer_tables, packed.at, meta)
        dtype = DTYPES[meta.dtype]
        keys = rotate_in_place(keys, layer_tables.rope_of("keys"), 1)
        values = rotate_in_place(values, layer_tables.rope_of("values"), 1)
        return LayerKV(
            narrowed(keys, dtype).to(blob.device), narrowed(values, dtype).to(blob.device)
        )

    def _restored(
        self, parts: Sequence[Tensor], layer_tables: LayerTables, at: int, meta: LayerMeta
    ) -> tuple[Tensor, Tensor]:
        """Return float32 keys and values, with the keys still rotated to position 0."""
        n, width = meta.key_shape[1], self.level.width(at, len(self.tables.layers))
        outliers, *scales = parts[:3]
        rows = np.frombuffer(outliers.contiguous().numpy().tobytes(), dtype="<u4").astype(np.int64)
        split = Split.of(n, torch.from_numpy(rows), self.level.deltas)
        views = [memoryview(part.contiguous().numpy().tobytes()) for part in parts[3:]]
        codes = self._unpack_exact(views[0], views[1], layer_tables, len(split.exact))
        exact = [
            from_8bit(code, _scales(scale, code.shape))
            for code, scale in zip(codes, scales, strict=True)
        ]
        order, sections = self._for_rest(layer_tables, at, n)
        numbers = coders.decode(views[2], views[3], order, sections, len(split.rest))
        cut = layer_tables.keys.heads * layer_tables.keys.dim
        keys = from_numbers(numbers[:cut], layer_tables.keys, width, exact[0], split)
        return keys, from_numbers(numbers[cut:], layer_tables.values, width, exact[1], split)

    def _outliers(self, tensors: Sequence[Tensor], layer_tables: LayerTables) -> Tensor:
        """Return the rows of outlier tokens, int64; none if the level does not treat outliers
        apart.
        """
        if not self.level.outlier_factor:
            return torch.zeros(0, dtype=torch.int64)
        keys, values = (
            outlier_tokens(tensor, part, self.level.outlier_factor)
            for tensor, part in zip(tensors, (layer_tables.keys, layer_tables.values), strict=True)
        )
        return (keys | values).nonzero()[:, 0]

    def _pack_exact(self, codes: Sequence[Tensor], layer_tables: LayerTables) -> list[bytes]:
        """Pack the 8-bit codes. Anchors are many, so they are entropy-coded; a few outliers alone
        are stored as is.
        """
        if not self.level.deltas:
            return [b"".join(code.numpy().tobytes() for code in codes), b""]
        rows = np.concatenate(
            [code.mT.reshape(-1, code.shape[1]).numpy() for code in codes]
        ).astype(np.int32)
        return coders.encode(rows, *self._for_anchors(layer_tables))

    def _unpack_exact(
        self, stream: memoryview, large: memoryview, layer_tables: LayerTables, count: int
    ) -> list[Tensor]:
        """Unpack the 8-bit codes of keys and of values, each `[H, count, D]`."""
        shapes = [
            (part.heads, count, part.dim) for part in (layer_tables.keys, layer_tables.values)
        ]
        if not self.level.deltas:
            flat, cut = np.frombuffer(stream, dtype=np.int8).copy(), prod(shapes[0])
            parts = zip((flat[:cut], flat[cut:]), shapes, strict=True)
            return [torch.from_numpy(part.reshape(shape)) for part, shape in parts]
        rows = coders.decode(stream, large, *self._for_anchors(layer_tables), count)
        cut = layer_tables.keys.heads * layer_tables.keys.dim
        both = zip((rows[:cut], rows[cut:]), shapes, strict=True)
        return [torch.from_numpy(part).view(heads, dim, count).mT for part, (heads, _, dim) in both]

    def _for_anchors(self, layer_tables: LayerTables) -> tuple[Order, tuple[Section, ...]]:
        spreads = np.concatenate(
            [part.codes("anchor") for part in (layer_tables.keys, layer_tables.values)]
        )
        return coders.in_sections(spreads - MIDDLE, WIDTHS[-1][1])

    def _for_rest(
        self, layer_tables: LayerTables, at: int, n: int
    ) -> tuple[Order, tuple[Section, ...]]:
        """Return order and sections of a layer's rows, sorted by the spread of their bin
        numbers.
        """
        what: What = "change" if self.level.deltas else "spread"
        spreads = np.concatenate(
            [part.codes(what) for part in (layer_tables.keys, layer_tables.values)]
        )
        bins = round(STEPS_PER_OCTAVE * log2(self.level.width(at, len(self.tables.layers))))
        width = next(width for min_tokens, width in WIDTHS if n >= min_tokens)
        return coders.in_sections(spreads - MIDDLE - bins, width)

    def _level_fields(self, at: int) -> bytes:
        """Return the 16 bytes in a container that identify the level's settings."""
        return LEVEL_FIELDS.pack(self.level.width(at, len(self.tables.layers)), self.level.deltas)


def _scales(scales: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the scales of the 8-bit codes, bfloat16 `[H, count, 1]`."""
    numbers = np.frombuffer(scales.contiguous().numpy().tobytes(), dtype=np.int16)
    return torch.from_numpy(numbers.reshape(shape[0], shape[1], 1).copy()).view(BIN_SCALE_DTYPE)
