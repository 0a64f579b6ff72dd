"""Segments of a stored run: the rows that they name, and by how much those are turned."""

import pytest

from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Prompt, Segment

KEY = ChunkKey("m", "t")


@pytest.mark.parametrize(
    ("segment", "shift"),
    [
        (Segment((1, 2), 7, "module", (KEY,)), 7),
        (Segment((1, 2), 7), 7),
        (Segment((3, 4), 7, "module", (KEY,), rows=(2, 4)), 5),
        (Segment((3, 4), 17, "module", (KEY,), rows=(2, 4), origin=5), 5),
    ],
)
def test_a_segment_is_turned_by_where_its_run_would_start(segment, shift):
    assert segment.shift == shift


def test_pieces_of_one_run_stand_apart_in_a_prompt():
    pieces = [
        Segment((1, 2), 0, "module", (KEY,), rows=(0, 2)),
        Segment((3,), 5, "module", (KEY,), rows=(2, 3), origin=0),
    ]
    prompt = Prompt((*pieces, Segment((9,), 6)))
    assert prompt.positions.tolist() == [0, 1, 5, 6]
    assert prompt.spans == ((0, 2), (2, 3), (3, 4))
