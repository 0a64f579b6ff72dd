"""A score of prompt rows: how near they are to words that the question shares with the chunks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d

WIDTH = 6.0
"""Distance in tokens over which nearness falls to 1/e."""
WORD_REACH_TOKENS = 24
"""Distance in tokens beyond which a word adds nothing to a row's score."""


def nearness(words: Tensor, asked: Tensor, candidates: Tensor) -> Tensor:
    """Return for every row the summed weight of the question's words in the chunks around it.

    A word weighs log(C / number of candidate rows with it), an inverse document frequency whose documents are the rows
    of this prompt; at a distance of d rows it counts exp(-d / 6) of that.

    Args:
        words: int64 [T], the number of the word that each row is part of; -1 for none.
        asked: int64 [Q], the rows of the question.
        candidates: int64 [C], the rows of chunks that may be recomputed.

    Returns:
        float32 [T], on the CPU.
    """
    of_chunks, asking = words[candidates], words[asked]
    met, count = torch.unique(of_chunks[of_chunks >= 0], return_counts=True)
    weight = torch.zeros(int(words.max()) + 2)
    weight[met] = torch.log(len(candidates) / count)
    known = torch.zeros_like(weight)
    known[asking[asking >= 0]] = 1.0
    at = torch.zeros(len(words))
    at[candidates] = (weight * known)[of_chunks]
    away = torch.arange(-WORD_REACH_TOKENS, WORD_REACH_TOKENS + 1).abs()
    return conv1d(at[None, None], torch.exp(-away / WIDTH)[None, None], padding=WORD_REACH_TOKENS)[0, 0]
