"""Layers of KV to pack: some that look like a model's, some that look like nothing."""

import torch

from ragfuse.core import LayerKV


def layer(
    heads: int = 2, n: int = 37, dim: int = 16, value_dim: int = 12, dtype: torch.dtype = torch.float32, seed: int = 0
) -> LayerKV:
    """Keys and values whose channels differ in size and mean, with a first token that is many times larger."""
    generator = torch.Generator().manual_seed(seed)

    def some(size: int) -> torch.Tensor:
        spread = torch.rand(heads, 1, size, generator=generator) * 3 + 0.1
        values = torch.randn(heads, n, size, generator=generator) * spread + spread * 2
        values[:, 0] *= 20
        return values.to(dtype)

    return LayerKV(some(dim), some(value_dim))
