"""Segments of a stored run: the rows that they name, and by how much those are turned."""

import pytest

from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Prompt, Segment

KEY = ChunkKey("m", "t")


def test_a_segment_without_rows_is_its_whole_run_turned_by_its_start() -> None:
    assert Segment((1, 2), 7, "module", (KEY,)).shift == 7
    assert Segment((1, 2), 7).shift == 7


def test_rows_of_a_run_without_gaps_are_turned_by_where_the_run_would_start() -> None:
    assert Segment((3, 4), 7, "module", (KEY,), rows=(2, 4)).shift == 5


def test_rows_of_a_run_with_gaps_are_turned_by_where_its_position_0_stands() -> None:
    assert Segment((3, 4), 17, "module", (KEY,), rows=(2, 4), origin=5).shift == 5


@pytest.mark.parametrize("rows", [(0, 1), (0, 3), (-1, 1), (2, 0)])
def test_a_segment_has_as_many_tokens_as_rows(rows: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="as many as rows"):
        Segment((1, 2), 0, "module", (KEY,), rows=rows)


def test_pieces_of_one_run_stand_apart_in_a_prompt() -> None:
    pieces = [
        Segment((1, 2), 0, "module", (KEY,), rows=(0, 2)),
        Segment((3,), 5, "module", (KEY,), rows=(2, 3), origin=0),
    ]
    prompt = Prompt((*pieces, Segment((9,), 6)))
    assert prompt.positions.tolist() == [0, 1, 5, 6]
    assert prompt.spans == ((0, 2), (2, 3), (3, 4))
