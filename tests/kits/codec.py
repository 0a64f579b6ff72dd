"""Layers of KV to pack: some that look like a model's, some that look like nothing."""

import torch

from ragfuse.codec import CodecTables, profile_tables
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout


def layer(
    heads: int = 2,
    n: int = 37,
    dim: int = 16,
    value_dim: int = 12,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    like: int = 0,
) -> LayerKV:
    """Keys and values whose channels differ in size and mean, with a first token that is many times
    larger.

    like: layers that are alike in it have channels that are spread alike.
    """
    generator, model = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(like)

    def some(size: int) -> torch.Tensor:
        spread = torch.rand(heads, 1, size, generator=model) * 3 + 0.1
        values = torch.randn(heads, n, size, generator=generator) * spread + spread * 2
        values[:, 0] *= 20
        return values.to(dtype)

    return LayerKV(some(dim), some(value_dim))


ROPE = RopeLayout(tuple(100.0 ** (-pair / 8) for pair in range(8)))


def tables(
    rope: bool = True, heads: int = 2, dim: int = 16, value_dim: int = 12, n_layers: int = 3
) -> CodecTables:
    """Tables of a model whose layers look like `layer`."""
    chunks = [
        ChunkKV(
            tuple(
                layer(heads, 60, dim, value_dim, seed=10 * seed + at, like=at)
                for at in range(n_layers)
            )
        )
        for seed in range(3)
    ]
    return profile_tables(chunks, [ROPE if rope else None] * n_layers)
