"""The codec of the CacheGen paper (section 5.2), and profiling of the codec tables on real text.

KV is quantised per channel, then entropy-coded with profiled distributions. Keys are first rotated
back to position 0. Outlier tokens, such as the first token of a text, are stored in 8 bits. All
other values are stored as bin numbers: a value's difference from the mean of its channel, counted
in bins. The width of a bin is the level's width times the channel's step. `coders.py` packs the
bin numbers. docs/guides/codec.md lists the differences from the paper, with reasons.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log, log2
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ragfuse.codec import coders
from ragfuse.codec.codec import DTYPES, LayerMeta, OtherTables, narrowed, pack, unpack
from ragfuse.codec.coders import (
    BIN_SCALE_DTYPE,
    Order,
    Section,
    Split,
    from_8bit,
    from_numbers,
    outlier_tokens,
    to_8bit,
    to_numbers,
)
from ragfuse.codec.tables import (
    MIDDLE,
    STEPS_PER_OCTAVE,
    Channels,
    CodecTables,
    LayerTables,
    from_codes,
    to_codes,
)
from ragfuse.fuse.rope import part_layout, rotate_in_place, rotated_pairs
from ragfuse.types.choices import CodecLevel
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout

MIN_TOKENS = 11
"""Minimum number of tokens in a chunk that is used for profiling."""
MEDIAN = 0.6745
"""Median absolute value of a normal distribution, in standard deviations."""
MAX_WEIGHT = 16.0
"""Maximum weight of a channel's quantisation error. The minimum weight is 1 / MAX_WEIGHT."""
MAX_WIDTH_FACTOR = 4.0
"""Maximum factor by which a layer's bins are widened or narrowed for the layer's error cost."""
MIN_SPREAD_SHARE = 1e-4
"""Minimum standard deviation of a channel, as a share of the head's standard deviation."""


def profile_tables(
    chunks: Iterable[ChunkKV],
    rope: Sequence[RopeLayout | None] = (),
    queries: Sequence[Tensor] = (),
    costs: Sequence[tuple[float, float]] = (),
) -> CodecTables:
    """Profile the codec tables of a model.

    Args:
        chunks: KV computed by the model, some thousand tokens in total. All chunks must fit into
            memory together.
        rope: The RoPE layout of each layer, from the model's profile. If empty, keys are not
            rotated back.
        queries: For each layer, the root mean square of the queries in each key channel, float32
            `[H, D]`. Errors in a channel are weighted by this number. If empty, weights are equal.
        costs: For each layer, (cost of errors in keys, cost of errors in values), measured with
            tables made without `costs`. Bins are narrower in costly layers and wider in cheap
            layers, so that all layers cost the same. This minimises the total cost at a given size.

    Raises:
        ValueError: No chunk is long enough.
    """
    long_chunks = [chunk for chunk in chunks if chunk.n_tokens >= MIN_TOKENS]
    if not long_chunks:
        raise ValueError(
            f"Codec tables need a chunk of at least {MIN_TOKENS} tokens, but all chunks are"
            " shorter. Pass longer chunks."
        )
    n_layers, layers = len(long_chunks[0].layers), list[LayerTables]()
    layouts = tuple(rope) or (None,) * n_layers
    widths = _widths(costs) if costs else [(1.0, 1.0)] * n_layers
    for at, layout in enumerate(layouts):
        weights = _weights(queries[at], layout) if queries else None
        keys = _channels(_values(long_chunks, at, "keys", layout), widths[at][0], weights)
        values = _channels(_values(long_chunks, at, "values", layout), widths[at][1])
        layers.append(LayerTables(keys, values, layout))
    return CodecTables(tuple(layers))


def _channels(tokens: Tensor, width: float, weights: Tensor | None = None) -> Channels:
    """Return the statistics of one layer's keys or values, float32 `[H, n, D]`."""
    scale = tokens.abs().median(1, keepdim=True).values.clamp_min(1e-30) / MEDIAN
    # outliers are stored in 8 bits and left out of the statistics
    plain = ~outlier_tokens(tokens, scale)
    every = tokens[:, plain] if bool(plain.any()) else tokens
    mean = every.mean(1, keepdim=True).clamp(-6e4, 6e4).half()
    above = every - mean.float()
    spread = above.square().mean(1).sqrt()
    whole = spread.square().mean(-1, keepdim=True).sqrt()
    spread = torch.maximum(spread, MIN_SPREAD_SHARE * whole)
    step = width * _geometric_mean(spread).expand_as(spread)
    step_codes = to_codes((step if weights is None else step / weights).numpy())
    steps = torch.from_numpy(from_codes(step_codes)).view(len(spread), 1, -1)
    rows = (above / steps).transpose(1, 2).reshape(spread.numel(), -1)
    spread_codes = to_codes(rows.square().mean(1).sqrt().numpy())
    heads, dim = spread.shape
    return Channels(heads, dim, mean.numpy().astype("<f2").tobytes(), step_codes, spread_codes)


def _values(chunks: Sequence[ChunkKV], at: int, name: str, layout: RopeLayout | None) -> Tensor:
    found = (getattr(chunk.layers[at], name) for chunk in chunks)
    rotated = [
        rotate_in_place(tensor.to("cpu", torch.float32, copy=True), part_layout(layout, name), -1)
        for tensor in found
    ]
    return torch.cat(rotated, 1)


def _weights(queries: Tensor, layout: RopeLayout | None) -> Tensor:
    """Return the weight of each key channel's errors, `[H, D]`. The geometric mean is about 1.

    Both channels of a pair that RoPE rotates get the same weight, since the rotation between key
    and query mixes both channels.
    """
    power = queries.float().square().cpu()
    if keys_layout := part_layout(layout, "keys"):
        first, second = rotated_pairs(power, keys_layout)
        both = (first + second) / 2
        first.copy_(both)
        second.copy_(both)
    size = power.sqrt()
    return (size / _geometric_mean(size)).clamp(1 / MAX_WEIGHT, MAX_WEIGHT)


def _widths(costs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return factors (keys, values) on each layer's bin width, with a geometric mean of 1."""
    logs = -torch.tensor(costs, dtype=torch.float64).clamp_min(1e-30).log() / 2
    near = (logs - logs.median()).clamp(-log(MAX_WIDTH_FACTOR), log(MAX_WIDTH_FACTOR))
    return [(keys, values) for keys, values in (near - near.mean()).exp().tolist()]


def _geometric_mean(spread: Tensor) -> Tensor:
    """Return the geometric mean of each head's channels, `[H, 1]`."""
    return spread.clamp_min(1e-30).log().mean(-1, keepdim=True).exp()


LEVEL_FIELDS: Final = struct.Struct("<f12x")
WIDTHS: Final = ((256, 4), (64, 8), (0, 16))
"""Pairs (minimum tokens of a chunk, range of spread codes in one class of channels). Each class
stores a Huffman table, so short chunks have few classes with wide ranges.
"""


@dataclass(frozen=True, slots=True)
class CacheGenCodec:
    """The codec of one CacheGen level (`cg1` to `cg4`) for one model.

    Args:
        tables: The codec tables of the model.
        level: The codec level.
    """

    tables: CodecTables
    level: CodecLevel

    @property
    def name(self) -> str:
        """Name of the codec level."""
        return self.level.name

    @property
    def width(self) -> float:
        """Width of a bin, in steps of the channel, rounded to the stored float32."""
        return float(np.float32(self.level.width))

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Encode layer `at` to uint8 `[nbytes]` (see `Codec.encode`).

        Raises:
            ValueError: The layer contains NaN or infinities.
        """
        layer_tables = self.tables.layers[at]
        shares = layer_tables.keys, layer_tables.values
        tensors = [
            rotate_in_place(
                tensor.to("cpu", torch.float32, copy=True), part_layout(layer_tables.rope, name), -1
            )
            for tensor, name in ((layer.keys, "keys"), (layer.values, "values"))
        ]
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise ValueError(
                "The layer contains NaN or infinity, which only the level `raw` can store."
            )
        keys, values = (
            outlier_tokens(tensor, torch.from_numpy(part.rms))
            for tensor, part in zip(tensors, shares, strict=True)
        )
        split = Split.of(keys | values)
        exact = [to_8bit(tensor[:, split.exact]) for tensor in tensors]
        numbers = [
            to_numbers(tensor[:, split.rest], part, self.width)
            for tensor, part in zip(tensors, shares, strict=True)
        ]
        parts = [
            split.exact.numpy().astype("<u4").tobytes(),
            *(scales.contiguous().view(torch.int16).numpy().tobytes() for _, scales in exact),
            b"".join(codes.numpy().tobytes() for codes, _ in exact),
            *coders.encode(np.concatenate(numbers), *self._rows(layer_tables, layer.n_tokens)),
        ]
        packed = [torch.from_numpy(np.frombuffer(part, dtype=np.uint8).copy()) for part in parts]
        blob = pack(at, self.tables.digest, LEVEL_FIELDS.pack(self.width), packed)
        return blob.to(layer.keys.device)

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Decode a layer (see `Codec.decode`). A bin number is decoded to the centre of its bin.

        Raises:
            OtherTables: The layer was encoded with other tables, at another level, or by another
                version of the codec.
        """
        at, codec_fields, parts = unpack(blob.cpu(), self.tables.digest)
        if codec_fields != LEVEL_FIELDS.pack(self.width):
            raise OtherTables(
                f"The layer was encoded at another level than {self.name}, or by another version"
                " of ragfuse."
            )
        layer_tables, dtype = self.tables.layers[at], DTYPES[meta.dtype]
        restored = self._restored(parts, layer_tables, meta.key_shape[1])
        placed = (
            rotate_in_place(tensor, part_layout(layer_tables.rope, name), 1)
            for tensor, name in zip(restored, ("keys", "values"), strict=True)
        )
        return LayerKV(*(narrowed(tensor, dtype).to(blob.device) for tensor in placed))

    def _restored(
        self, parts: Sequence[Tensor], layer_tables: LayerTables, n: int
    ) -> Iterator[Tensor]:
        """Yield the keys, then the values of n tokens, in float32. Keys are still at position 0."""
        shares = layer_tables.keys, layer_tables.values
        outliers, *scales, codes, stream, large = (
            memoryview(part.contiguous().numpy().tobytes()) for part in parts
        )
        is_exact = torch.zeros(n, dtype=torch.bool)
        is_exact[torch.from_numpy(np.frombuffer(outliers, dtype="<u4").astype(np.int64))] = True
        split = Split.of(is_exact)
        flat = np.frombuffer(codes, dtype=np.int8).copy()
        order, sections = self._rows(layer_tables, n)
        rows = coders.decode(stream, large, order, sections, len(split.rest))
        cut = layer_tables.keys.heads * layer_tables.keys.dim
        exact = np.split(flat, [cut * len(split.exact)])
        for part, own, scale, eight in zip(
            shares, (rows[:cut], rows[cut:]), scales, exact, strict=True
        ):
            code = torch.from_numpy(eight.reshape(part.heads, len(split.exact), part.dim))
            by = np.frombuffer(scale, dtype=np.int16).reshape(*code.shape[:2], 1).copy()
            by_token = torch.from_numpy(by).view(BIN_SCALE_DTYPE)
            yield split.joined(from_numbers(own, part, self.width), from_8bit(code, by_token))

    def _rows(self, layer_tables: LayerTables, n: int) -> tuple[Order, tuple[Section, ...]]:
        """Return a layer's channels sorted into sections of similar spread, for n tokens."""
        spreads = np.concatenate(
            [part.spreads for part in (layer_tables.keys, layer_tables.values)]
        )
        bins = round(STEPS_PER_OCTAVE * log2(self.width))
        width = next(width for min_tokens, width in WIDTHS if n >= min_tokens)
        return coders.in_sections(spreads - MIDDLE - bins, width)
