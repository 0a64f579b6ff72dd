"""Make a model's codec tables from the KV of real text: spread and distribution of each channel's
keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log

import torch
from torch import Tensor

from ragfuse.codec.coders import outlier_tokens
from ragfuse.codec.tables import Channels, CodecTables, LayerTables, from_codes, to_codes
from ragfuse.fuse.rope import part_layout, rotate_in_place, rotated_pairs
from ragfuse.types.kv import ChunkKV, RopeLayout

MIN_TOKENS = 11
"""Least tokens of a chunk that tables are made from."""
MEDIAN = 0.6745
"""Median absolute value of a normal distribution, in standard deviations."""
MAX_WEIGHT = 16.0
"""Largest weight of a channel's error; its inverse is the smallest."""
MAX_WIDTH_FACTOR = 4.0
"""Largest factor on a layer's bins, up or down, by what errors cost there."""
MIN_SPREAD_SHARE = 1e-4
"""Smallest spread of a channel, as a share of its head's."""


def profile_tables(
    chunks: Iterable[ChunkKV],
    rope: Sequence[RopeLayout | None] = (),
    queries: Sequence[Tensor] = (),
    costs: Sequence[tuple[float, float]] = (),
) -> CodecTables:
    """Make the codec tables of a model.

    Args:
        chunks: KV that the model computed, some thousand tokens in all. It is held in memory
            meanwhile.
        rope: How each layer's keys carry position, as in the model's profile; without it keys are
            not rotated back.
        queries: For each layer, root mean square of the queries that meet each key channel, float32
            `[H, D]`. Errors are weighted by it; without it, all channels of a head count alike.
        costs: For each layer, the cost of quantisation errors in its keys and in its values,
            measured with tables made without `costs`. Bin widths are set so that errors cost the
            same in every layer, which costs least at a given size.

    Raises:
        ValueError: No chunk is long enough.
    """
    long_chunks = [chunk for chunk in chunks if chunk.n_tokens >= MIN_TOKENS]
    if not long_chunks:
        raise ValueError(
            f"Codec tables need chunks of at least {MIN_TOKENS} tokens; none is that long."
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
    """Return the statistics of keys or values float32 `[H, n, D]` of one layer."""
    scale = tokens.abs().median(1, keepdim=True).values.clamp_min(1e-30) / MEDIAN
    # outliers are stored in 8 bits
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
    """Return the channels' weights, `[H, D]`, around 1.

    Both channels of a rotated pair get the same, as a key meets queries from all distances.
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
    """Return factors on each layer's bins, from costs; their geometric mean is 1."""
    logs = -torch.tensor(costs, dtype=torch.float64).clamp_min(1e-30).log() / 2
    near = (logs - logs.median()).clamp(-log(MAX_WIDTH_FACTOR), log(MAX_WIDTH_FACTOR))
    return [(keys, values) for keys, values in (near - near.mean()).exp().tolist()]


def _geometric_mean(spread: Tensor) -> Tensor:
    """Return the geometric mean of each head's channels, `[H, 1]`."""
    return spread.clamp_min(1e-30).log().mean(-1, keepdim=True).exp()
