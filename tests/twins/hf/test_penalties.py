"""OpenAI's penalties, against the slow obvious way."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.hf.grammar import Penalties

SIZE, PROMPT = 12, [1, 2, 2, 5]
TOKENS = st.lists(st.integers(0, SIZE - 1), max_size=12)
STRENGTH = st.floats(-2, 2)


def slow(scores: list[float], written: list[int], presence: float, frequency: float):
    """One token after the other, as the API's documentation has it."""
    return [
        logit - frequency * written.count(token) - (presence if token in written else 0.0)
        for token, logit in enumerate(scores)
    ]


@given(TOKENS, TOKENS, STRENGTH, STRENGTH)
def test_penalties_are_those_of_the_slow_way(one, other, presence, frequency):
    size = min(len(one), len(other))
    penalties, rows = Penalties(presence, frequency), [one[:size], other[:size]]
    scores = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))
    for at in range(size + 1):  # as `generate` calls it: after the prompt, then after every token
        before = scores.clone()
        found = penalties(torch.tensor([[*PROMPT, *row[:at]] for row in rows]), scores)
        wanted = [
            slow(line, row[:at], presence, frequency)
            for line, row in zip(scores.tolist(), rows, strict=True)
        ]
        assert torch.allclose(found, torch.tensor(wanted), atol=1e-4)
        assert torch.equal(scores, before)
