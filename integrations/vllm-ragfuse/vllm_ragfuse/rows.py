"""Where a prompt's tokens and KV heads are in one rank's paged cache. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def heads_of_rank(n_heads: int, rank: int, n_ranks: int) -> slice:
    """Return the KV heads of a tensor parallel rank, split as vLLM does.

    Args:
        n_heads: KV heads of the model.
        rank: The rank, 0..n_ranks-1.
        n_ranks: Number of tensor parallel ranks. With more ranks than heads, several share a head.
    """
    if n_ranks <= n_heads:
        each = n_heads // n_ranks
        return slice(rank * each, (rank + 1) * each)
    head = rank // (n_ranks // n_heads)
    return slice(head, head + 1)


def slots_of(blocks: Sequence[int], block_size: int, lo: int, hi: int) -> Tensor:
    """Return the slots of a prompt's tokens lo:hi in the paged cache, int64 [hi - lo].

    Args:
        blocks: The request's blocks, from the prompt's first token on.
        block_size: Tokens per block.
        lo: Index of the first token in the prompt.
        hi: One past the last token's index.
    """
    rows = torch.arange(lo, hi)
    return (
        torch.tensor(blocks, dtype=torch.int64)[rows // block_size] * block_size + rows % block_size
    )
