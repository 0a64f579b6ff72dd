"""The formulas against numbers worked out by hand."""

import pytest
from ragfuse_bench.ideal import Work

ROUND = {"layers": 24, "chunks": 6, "chunk_tokens": 512, "suffix": 32}
LOOKS = {"layers": 10, "chunks": 2, "chunk_tokens": 100, "suffix": 20}


@pytest.mark.parametrize(
    ("work", "speedup", "prefix_aware"),
    [
        # of 3,104 tokens layer 0 computes all, or all but the exact first chunk
        (
            Work(**ROUND, ratio=0.15),
            24 / (1 + 23 * 492.8 / 3104),
            24 * 3104 / (2592 + 23 * 416),
        ),
        # a static policy computes no layer in full
        (
            Work(**ROUND, ratio=16 / 512, check_layer=0),
            3104 / (6 * 16 + 32),
            3104 / (5 * 16 + 32),
        ),
        # a look computes the question's rows up to the layers that it watches once more
        (
            Work(**LOOKS, ratio=0.1, check_layer=0, look=True),
            220 / (20 + 20 + 14),
            220 / (10 + 20 + 14),
        ),
    ],
)
def test_the_ideal_speedup_counts_the_rows_of_each_layer(work, speedup, prefix_aware) -> None:
    assert work.ideal_speedup == pytest.approx(speedup)
    assert work.ideal_prefix_aware == pytest.approx(prefix_aware)
