"""How each piece of a stream is sent, and when a late one is given up."""

from __future__ import annotations

from collections.abc import Mapping
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
    StreamPiece,
    better_level,
    delay_s,
    first_level,
    first_look_s,
    is_given_up,
    pieces,
)
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch
from tests.reference import Sent, streamed_at

NAMES = ("raw", "int8", "cg1", "cg2", "cg3")
SIZES = {"raw": 8_000_000, "int8": 4_000_000, "cg1": 1_600_000, "cg2": 1_000_000, "cg3": 600_000}


def part(
    segment: int,
    tokens: int,
    sizes: Mapping[str, int],
    text_s: float | None = None,
    decode_s=MappingProxyType({}),
):
    """A segment with an entry of its own."""
    fetch = Fetch(
        segment, ChunkKey("model", str(segment)), "line", "raw", 0, tokens, tuple(sizes.items())
    )
    return StreamPart(fetch, (segment,), tokens, text_s, decode_s)


def piece(
    segment: int = 0, tokens: int = 1500, text_s: float | None = 1.0, **sizes: int
) -> StreamPiece:
    return StreamPiece((part(segment, tokens, sizes or SIZES, text_s),))


@some.composite
def streams(draw) -> list[Sent]:
    """Pieces that all have levels of the same order, though not all of them all."""
    seconds = some.floats(0, 5)
    timed = draw(some.booleans())
    made = []
    for _ in range(draw(some.integers(1, 5))):
        names = draw(some.lists(some.sampled_from(NAMES), unique=True, max_size=5))
        levels = tuple(
            (name, draw(some.integers(1, 10**7)), draw(seconds))
            for name in sorted(names, key=NAMES.index)
        )
        made.append(Sent(levels, draw(seconds) if timed or draw(some.booleans()) else None))
    return made


@given(stream=streams(), throughput=some.floats(1e3, 1e9), others=some.integers(0, 4))
def test_the_time_of_a_stream_is_that_of_one_link_and_one_decoder(stream, throughput, others):
    left = [
        StreamPiece(
            (
                part(
                    at,
                    1500,
                    {name: nbytes for name, nbytes, _ in sent.levels},
                    sent.text_s,
                    {name: seconds for name, _, seconds in sent.levels},
                ),
            )
        )
        for at, sent in enumerate(stream)
    ]
    for rank, level in enumerate(left[0].sizes):
        by_hand = streamed_at(stream, rank, level, throughput, others)
        assert delay_s(left, level, throughput, 1 + others) == pytest.approx(by_hand)


def test_all_pieces_are_recomputed_where_that_is_in_time_or_read_raw_where_that_is_faster():
    left = [piece(0), piece(1)]
    in_time = 2 * COMPUTE_MARGIN
    assert first_level(left, None, in_time) == AS_TEXT
    assert first_level(left, 7e6, in_time) == AS_TEXT
    assert first_level(left, 9e6, in_time) == "raw"
    assert first_level(left, 9e6, in_time, sharing=2) == AS_TEXT
    assert first_level([piece(int8=1, cg1=1)], 1e12, in_time) == AS_TEXT

    assert first_level([StreamPiece((part(0, 10, {}, None),))], 1e9, 0.0) == AS_TEXT


def test_a_late_piece_first_comes_at_its_most_lossy_level():
    late = 2 * COMPUTE_MARGIN - 0.01
    assert first_level([piece(0), piece(1)], 1e12, late) == "cg3"
    assert first_level([piece(0), piece(1)], None, late) == "cg3"
    assert first_level([piece(text_s=None)], 1e3, 1e9) == "cg3"
    assert first_level([piece()], 1.0, 9.0, is_whole=False) == "cg3"  # others came so before it


def test_the_lossiest_pieces_come_again_at_the_best_level_for_which_there_is_time():
    left = [piece(0), piece(1)]
    assert better_level(left, ["raw", "int8", "cg1"], 1e6, 17.0) == "raw"
    assert better_level(left, ["raw", "int8", "cg1"], 1e6, 9.0) == "int8"
    assert better_level(left, ["raw", "int8", "cg1"], 1e6, 2.0) == "cg1"
    assert better_level(left, ["raw", "int8", "cg1"], 1e6, 1.0) == ""


def test_decoding_counts_and_hides_behind_what_is_still_on_its_way():
    slow = [
        StreamPiece((part(at, 1500, {"cg1": 1_000_000}, None, {"cg1": 0.5}),)) for at in range(3)
    ]
    assert delay_s(slow, "cg1", 1e6) == pytest.approx(3.5)
    assert delay_s(slow, "cg1", 1e7) == pytest.approx(1.6)


def test_levels_of_a_piece_are_those_that_all_its_parts_have():
    both = StreamPiece(
        (part(0, 10, {"raw": 4, "int8": 2, "cg1": 1}), part(1, 10, {"raw": 4, "cg1": 1}))
    )
    assert both.sizes == {"raw": 8, "cg1": 2}


def test_a_piece_that_lacks_the_level_counts_at_its_own_of_that_rank():
    left = [piece(raw=100, cg1=10), piece(1, raw=100, cg3=6), piece(2, raw=50)]
    assert delay_s(left, "cg1", 1.0) == 10 + 6 + 50


@given(some.lists(some.integers(1, 4000), max_size=30), some.integers(1, 3000))
def test_pieces_are_whole_segments_in_order_and_as_long_as_allowed(tokens, most):
    parts = [part(at, n, {}) for at, n in enumerate(tokens)]
    cut = pieces(parts, most)
    assert [part for each in cut for part in each.parts] == parts
    for each, after in zip(cut, [*cut[1:], None], strict=False):
        assert each.tokens <= most or len(each.parts) == 1
        assert after is None or each.tokens + after.parts[0].tokens > most


def test_a_piece_is_late_after_some_times_what_was_foreseen():
    assert first_look_s(piece(), "int8", 4e6) == pytest.approx(PATIENCE)
    assert first_look_s(piece(), "int8", 4e6, sharing=3) == pytest.approx(3 * PATIENCE)
    assert first_look_s(piece(), "int8", 1e12) == NEVER_LATE_S
    assert first_look_s(piece(text_s=0.7), "int8", None) == 0.7  # an unknown line
    assert first_look_s(piece(text_s=None), "int8", None) is None


def test_a_late_piece_is_given_up_once_waiting_as_long_again_is_worse_than_computing():
    left = [piece(text_s=1.0, int8=4_000_000), piece(1, text_s=1.0, int8=4_000_000)]
    assert not is_given_up(left, "int8", 0.9, 0.0)
    assert is_given_up(left, "int8", 1.1, 0.0)
    assert not is_given_up([piece(text_s=None)], "int8", 100.0, 0.0)
    assert is_given_up(left[:1], "int8", 1.1, 1.0)
    assert not is_given_up(left[:1], "int8", 1.1, 1.2)  # it may still be in time


def test_a_late_piece_is_waited_for_where_the_rest_can_come_at_a_lesser_level():
    sizes = {"int8": 4_000_000, "cg3": 400_000}
    left = [piece(text_s=0.4, **sizes), piece(1, text_s=3.0, **sizes)]
    assert not is_given_up(left, "int8", 0.5, 1.0)
    assert is_given_up([left[0], piece(1, text_s=3.0, int8=4_000_000)], "int8", 0.5, 1.0)
