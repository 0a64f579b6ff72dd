"""Segments of a stored run: where their rows stand in a prompt."""

from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Prompt, Segment

KEY = ChunkKey("m", "t")


def test_pieces_of_one_run_stand_apart_in_a_prompt():
    pieces = [
        Segment((1, 2), 0, "module", (KEY,), rows=(0, 2)),
        Segment((3,), 5, "module", (KEY,), rows=(2, 3), origin=0),
    ]
    prompt = Prompt((*pieces, Segment((9,), 6)))
    assert prompt.positions.tolist() == [0, 1, 5, 6]
    assert prompt.spans == ((0, 2), (2, 3), (3, 4))
