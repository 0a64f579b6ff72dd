"""How near the rows of a prompt are to the words that its question shares with its chunks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d

WIDTH = 6.0
"""Tokens over which nearness falls to 1/e."""
WORD_REACH_TOKENS = 24
"""Tokens beyond which a row is near nothing."""


def nearness(words: Tensor, asked: Tensor, candidates: Tensor) -> Tensor:
    """Of every row, the weight of the question's words around it: float32 [T], on the CPU.

    words: int64 [T], which word each row is, -1 for none. asked: int64 [Q], rows of the question. candidates: int64
    [C], of chunks. A word weighs log(C / its rows among them), and at a distance of d rows exp(-d / 6) of it: an
    inverse document frequency whose documents are the rows of this prompt.
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
