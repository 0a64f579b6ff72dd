"""How each piece of a stream is sent, and when a late one is given up."""

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ragfuse.plan.stream_level import (
    AS_TEXT,
    COMPUTE_MARGIN,
    NEVER_LATE_S,
    PATIENCE,
    StreamPart,
    better_level,
    delay_s,
    first_level,
    first_look_s,
    is_given_up,
)
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch
from tests.twins.reference import Sent, streamed_at

NAMES = ("raw", "int8", "cg1", "cg2", "cg3")
SIZES = {"raw": 8_000_000, "int8": 4_000_000, "cg1": 1_600_000, "cg2": 1_000_000, "cg3": 600_000}


def part(
    segment,
    tokens,
    sizes,
    text_s=None,
    decode_s=MappingProxyType({}),
):
    """A segment with an entry of its own."""
    fetch = Fetch(
        segment, ChunkKey("model", str(segment)), "line", "raw", 0, tokens, tuple(sizes.items())
    )
    return StreamPart(fetch, (segment,), tokens, text_s, decode_s)


def piece(segment=0, tokens=1500, text_s=1.0, **sizes):
    return part(segment, tokens, sizes or SIZES, text_s)


@some.composite
def streams(draw):
    """Pieces that all have levels of the same order, though not all of them all."""
    seconds = some.floats(0, 5)
    timed = draw(some.booleans())
    made = []
    for _ in range(draw(some.integers(1, 5))):
        names = draw(some.lists(some.sampled_from(NAMES), unique=True, min_size=1, max_size=5))
        levels = tuple(
            (name, draw(some.integers(1, 10**7)), draw(seconds))
            for name in sorted(names, key=NAMES.index)
        )
        made.append(Sent(levels, draw(seconds) if timed or draw(some.booleans()) else None))
    return made


def as_parts(stream):
    return [
        part(
            at,
            1500,
            {name: nbytes for name, nbytes, _ in sent.levels},
            sent.text_s,
            {name: seconds for name, _, seconds in sent.levels},
        )
        for at, sent in enumerate(stream)
    ]


@given(stream=streams(), throughput=some.floats(1e3, 1e9), others=some.integers(0, 4))
def test_the_time_of_a_stream_is_that_of_one_link_and_one_decoder(stream, throughput, others):
    left = as_parts(stream)
    for rank, level in enumerate(left[0].sizes):
        by_hand = streamed_at(stream, rank, level, throughput, others)
        assert delay_s(left, level, throughput / (1 + others)) == pytest.approx(by_hand)


def test_all_pieces_are_recomputed_where_that_is_in_time_or_read_raw_where_that_is_faster():
    left = [piece(0), piece(1)]
    in_time = 2 * COMPUTE_MARGIN
    assert first_level(left, None, in_time) == AS_TEXT
    assert first_level(left, 7e6, in_time) == AS_TEXT
    assert first_level(left, 9e6, in_time) == "raw"
    assert first_level(left, 9e6 / 2, in_time) == AS_TEXT
    assert first_level([piece(int8=1, cg1=1)], 1e12, in_time) == AS_TEXT


def test_else_a_piece_first_comes_at_its_most_lossy_level():
    late = 2 * COMPUTE_MARGIN - 0.01
    assert first_level([piece(0), piece(1)], 1e12, late) == "cg3"
    assert first_level([piece(0), piece(1)], None, late) == "cg3"
    assert first_level([piece(text_s=None)], 1e3, 1e9) == "cg3"


def test_once_something_lossy_came_the_rest_is_read_too():
    assert first_level([piece()], 1.0, 9.0, is_whole=False) == "cg3"


def test_the_lossiest_pieces_come_again_at_the_best_level_for_which_there_is_time():
    left = [piece(0), piece(1)]
    assert better_level(left, ["raw", "int8", "cg1"], 1e6, 17.0) == "raw"
    assert better_level(left, ["raw", "int8", "cg1"], 1e6, 9.0) == "int8"
    assert better_level(left, ["raw", "int8", "cg1"], 1e6, 2.0) == "cg1"
    assert better_level(left, ["raw", "int8", "cg1"], 1e6, 1.0) == ""


def test_a_piece_is_late_after_some_times_what_was_foreseen():
    assert first_look_s(piece(), "int8", 4e6) == pytest.approx(PATIENCE)
    assert first_look_s(piece(), "int8", 4e6 / 3) == pytest.approx(3 * PATIENCE)
    assert first_look_s(piece(), "int8", 1e12) == NEVER_LATE_S


def test_a_late_piece_is_given_up_once_waiting_as_long_again_is_worse_than_computing():
    left = [piece(text_s=1.0, int8=4_000_000), piece(1, text_s=1.0, int8=4_000_000)]
    assert not is_given_up(left, "int8", 0.9, 0.0)
    assert is_given_up(left, "int8", 1.1, 0.0)
    assert not is_given_up([piece(text_s=None)], "int8", 100.0, 0.0)


def test_a_late_piece_is_waited_for_where_the_rest_can_come_at_a_lesser_level():
    sizes = {"int8": 4_000_000, "cg3": 400_000}
    left = [piece(text_s=0.4, **sizes), piece(1, text_s=3.0, **sizes)]
    assert not is_given_up(left, "int8", 0.5, 1.0)
    assert is_given_up([left[0], piece(1, text_s=3.0, int8=4_000_000)], "int8", 0.5, 1.0)
