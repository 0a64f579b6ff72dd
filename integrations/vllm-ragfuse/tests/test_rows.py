"""Which heads and slots of a paged cache a prompt's KV belongs in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
from vllm_ragfuse.rows import heads_of_rank, slots_of


@pytest.mark.parametrize(
    ("n_heads", "n_ranks", "wanted"),
    [
        (8, 2, [range(4), range(4, 8)]),
        (2, 4, [[0], [0], [1], [1]]),
    ],
)
def test_ranks_share_the_heads_as_vllm_does(
    n_heads: int, n_ranks: int, wanted: list[list[int]]
) -> None:
    heads = list(range(n_heads))
    assert [heads[heads_of_rank(n_heads, rank, n_ranks)] for rank in range(n_ranks)] == [
        list(each) for each in wanted
    ]


def test_rows_follow_the_blocks_of_a_request() -> None:
    blocks = [7, 2, 9]
    assert slots_of(blocks, 4, 0, 10).tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 36, 37]
    assert slots_of(blocks, 4, 4, 7).tolist() == [8, 9, 10]
