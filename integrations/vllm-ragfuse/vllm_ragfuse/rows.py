"""Compute which KV heads and which slots of the paged cache a rank writes for a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def heads_of_rank(n_heads: int, rank: int, n_ranks: int) -> slice:
    """Return the KV heads of a tensor parallel rank, split as vLLM splits the heads.

    Args:
        n_heads: Number of KV heads of the model.
        rank: The rank, 0..n_ranks-1.
        n_ranks: Number of tensor parallel ranks. If there are more ranks than heads, several ranks
            share a head.
    """
    if n_ranks <= n_heads:
        each = n_heads // n_ranks
        return slice(rank * each, (rank + 1) * each)
    head = rank // (n_ranks // n_heads)
    return slice(head, head + 1)


def slots_of(blocks: Sequence[int], block_size: int, lo: int, hi: int) -> Tensor:
    """Return the slots of a prompt's tokens lo:hi in the paged cache, int64 [hi - lo].

    Args:
        blocks: Ids of the request's blocks, beginning with the block of the prompt's first token.
        block_size: Number of tokens per block.
        lo: Index in the prompt of the first token.
        hi: Index in the prompt after the final token.
    """
    rows = torch.arange(lo, hi)
    return (
        torch.tensor(blocks, dtype=torch.int64)[rows // block_size] * block_size + rows % block_size
    )
