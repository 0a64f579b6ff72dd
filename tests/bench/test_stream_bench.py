"""Streams over changing lines: pieces are what full prefill computed, and the result says what it is
made of.
"""

from __future__ import annotations

import pytest
from ragfuse_bench.options import StreamOptions
from ragfuse_bench.stream.run import METHODS, run_stream
from rich.console import Console


@pytest.mark.slow
def test_the_result_says_how_often_each_way_was_late(varied_path, tmp_path):
    options = StreamOptions(
        model=str(varied_path),
        tokens=600,
        piece_tokens=150,
        contexts=1,
        questions=1,
        traces=4,
        deadlines=(0.5, 50.0),
        curve=(3.0,),
        home=tmp_path,
    )
    result = run_stream(options, Console(quiet=True))
    assert result["traces"] == 4
    assert [set(each["violations"]) for each in result["deadlines"]] == [set(METHODS)] * 2
    assert all(
        0 <= share <= 1 for each in result["deadlines"] for share in each["violations"].values()
    )
    assert result["deadlines"][1]["violations"]["adaptive"] == 0
    assert result["ttft_x_vs_text"] > 0
