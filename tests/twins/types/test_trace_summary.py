"""The one line that a trace is summed up in."""

from __future__ import annotations

import pytest

from ragfuse.types.answer import SegmentTrace, Trace
from ragfuse.types.plan import MISSING, NOT_SAFE


def chunk(at: int, why: str) -> SegmentTrace:
    return SegmentTrace("a.md", "chunk", 100, 100 * at, not why, why=why)


@pytest.mark.parametrize(
    ("whys", "said"),
    [
        ([NOT_SAFE, NOT_SAFE], f"0 of 2 chunks: {NOT_SAFE}), 0"),
        ([MISSING, MISSING], "0 of 2 chunks, 2 not stored yet), 0"),
        ([NOT_SAFE, ""], "1 of 2 chunks), 0"),
        (["", ""], "2 of 2 chunks), 0"),
    ],
)
def test_one_reason_against_all_chunks_is_told_once(whys, said):
    trace = Trace(
        tokens=300, tokens_reused=20, segments=tuple(chunk(at, why) for at, why in enumerate(whys))
    )
    assert said in trace.summary
