"""Choose rows near words of the question, from token ids alone, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from ragfuse.fuse.select.policy import Candidates, Policy, Wanted

WIDTH = 6.0
"""Distance in tokens over which nearness decays to 1/e."""
WORD_REACH_TOKENS = 24
"""Distance in tokens beyond which a word adds nothing to a row's nearness."""


def nearness(words: Tensor, question_rows: Tensor, candidates: Tensor) -> Tensor:
    """Return each row's nearness: the summed weights of question words in nearby candidate rows.

    A word's weight is log(C / number of candidate rows with the word), an inverse document
    frequency with rows as documents. At a distance of d rows, the weight is multiplied by
    exp(-d / 6).

    Args:
        words: int64 [T], the index of each row's word. -1 for a row without a word.
        question_rows: int64 [Q], the rows of the question.
        candidates: int64 [C], the candidate rows.

    Returns:
        float32 [T], on the CPU.
    """
    chunk_words, question_words = words[candidates], words[question_rows]
    found_words, count = torch.unique(chunk_words[chunk_words >= 0], return_counts=True)
    weight = torch.zeros(int(words.max()) + 2)
    weight[found_words] = log(len(candidates)) - count.log()
    known = torch.zeros_like(weight)
    known[question_words[question_words >= 0]] = 1.0
    row_weight = torch.zeros(len(words))
    row_weight[candidates] = (weight * known)[chunk_words]
    distance = torch.arange(-WORD_REACH_TOKENS, WORD_REACH_TOKENS + 1).abs()
    return conv1d(
        row_weight[None, None], torch.exp(-distance / WIDTH)[None, None], padding=WORD_REACH_TOKENS
    )[0, 0]


TIE_STEP = 1e-12
"""A score is lowered by this step times the candidate's index, so that earlier rows win ties."""


@dataclass(frozen=True, kw_only=True)
class Lexical(Policy):
    """Recomputes rows near rare words of the question, then rows at the start of each chunk."""

    name: str = "lexical"
    wants: Wanted = "words"

    def score(
        self, candidates: Candidates, active: Tensor, deviation: Tensor | None
    ) -> Tensor | None:
        """Return each row's nearness, or minus the row's offset in the chunk if nearness is 0."""
        if candidates.score is None:
            return None
        near = candidates.score.double().where(candidates.score > 0, -candidates.offset)
        return near.sub(active, alpha=TIE_STEP)
