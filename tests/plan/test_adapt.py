"""How the next piece of a stream comes: like section 5.3 and algorithm 1, followed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ragfuse.plan.adapt import (
    AS_TEXT,
    COMPUTE_MARGIN,
    NEVER_LATE_S,
    PATIENCE,
    STALLED_WAIT,
    STEP_S,
    STEPS_PER_PIECE,
    THROUGHPUT_MARGIN,
    StreamPart,
    StreamPiece,
    decide,
    decide_better,
    decide_first,
    delay_s,
    first_look_s,
    is_given_up,
    is_late,
    layers_together,
    pieces,
    spare_s,
)
from tests.reference import Sent, algorithm_1, section_5_3

NAMES = ("raw", "int8", "cg1", "cg2", "cg3")
SIZES = {"raw": 8_000_000, "int8": 4_000_000, "cg1": 1_600_000, "cg2": 1_000_000, "cg3": 600_000}


def piece(segment: int = 0, tokens: int = 1500, text_s: float | None = 1.0, **sizes: int) -> StreamPiece:
    return StreamPiece((StreamPart(segment, tokens, sizes or SIZES, text_s),))


@some.composite
def streams(draw) -> list[Sent]:
    """Pieces that all have levels of the same order, though not all of them all."""
    seconds = some.floats(0, 5)
    timed = draw(some.booleans())
    made = []
    for _ in range(draw(some.integers(1, 5))):
        names = draw(some.lists(some.sampled_from(NAMES), unique=True, max_size=5))
        levels = tuple((name, draw(some.integers(1, 10**7)), draw(seconds)) for name in sorted(names, key=NAMES.index))
        made.append(Sent(levels, draw(seconds) if timed or draw(some.booleans()) else None))
    return made


def as_pieces(stream: Sequence[Sent]) -> list[StreamPiece]:
    return [
        StreamPiece(
            (
                StreamPart(
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


@pytest.mark.parametrize(("adapt", "by_hand"), [("paper", section_5_3), ("algorithm", algorithm_1)])
@given(
    stream=streams(),
    throughput=some.one_of(some.none(), some.floats(1e3, 1e9)),
    left_s=some.floats(-1, 30),
    others=some.integers(0, 4),
)
def test_every_choice_is_the_papers(adapt, by_hand, stream, throughput, left_s, others):
    found = decide(as_pieces(stream), throughput, left_s, 1 + others, adapt)
    assert found == by_hand(stream, throughput, left_s, others)


@given(
    stream=streams(),
    throughput=some.floats(1e3, 1e9),
    left_s=some.floats(-1, 30),
    adapt=some.sampled_from(["paper", "algorithm"]),
)
def test_more_time_never_means_more_loss(stream, throughput, left_s, adapt):
    def loss(seconds: float) -> int:
        """Of what is in time: 0 for text and raw."""
        cut = as_pieces(stream)
        choice = decide(cut, throughput, seconds, 1, adapt)
        return 0 if choice in (AS_TEXT, "raw") else 1 + list(cut[0].sizes).index(choice)

    left = as_pieces(stream)
    if any(delay_s(left, level, throughput) <= left_s for level in left[0].sizes):
        assert loss(left_s + 1) <= loss(left_s)


def test_text_wins_where_it_is_in_time_and_the_line_needs_not_be_known():
    assert decide([piece(int8=1, cg1=1)], 1e12, 1.0) == AS_TEXT
    assert decide([piece()], None, 1.0) == AS_TEXT


def test_raw_loses_nothing_either_and_wins_where_it_is_there_before():
    assert decide([piece()], 8.1e6, 1.0) == "raw"
    assert decide([piece()], 7.9e6, 1.0) == AS_TEXT
    assert decide([piece(text_s=0.1)], 10e6, 1.0) == AS_TEXT


def test_the_two_differ_in_what_text_must_fit_into():
    left = [piece(at, int8=10, cg1=1) for at in range(4)]
    assert decide(left, 1e8, 1.5, adapt="paper") == "int8"
    assert decide(left, 1e8, 1.5, adapt="algorithm") == AS_TEXT


@pytest.mark.parametrize(
    ("mbps", "level"), [(40, "raw"), (39, "int8"), (20, "int8"), (19, "cg1"), (8, "cg1"), (5, "cg2"), (3, "cg3")]
)
def test_the_level_with_the_least_loss_that_is_in_time_is_taken(mbps, level):
    assert decide([piece(at) for at in range(5)], mbps * 1e6, 1.0 + 1e-9) == level


def test_what_is_in_time_counts_all_pieces_that_are_still_to_come():
    assert decide([piece()], 10e6, 0.9) == "raw"
    assert decide([piece(), piece(1)], 10e6, 0.9) == "int8"


def test_streams_that_share_a_line_take_so_many_times_as_long():
    assert decide([piece()], 10e6, 0.9, sharing=1) == "raw"
    assert decide([piece()], 10e6, 0.9, sharing=2) == "int8"
    assert decide([piece()], 10e6, 0.9, sharing=5) == "cg1"


def test_where_nothing_is_in_time_the_soonest_is_taken_which_may_be_text():
    assert decide([piece()], 1e6, 0.1) == "cg3"
    assert decide([piece()], 0.5e6, 0.1) == AS_TEXT
    assert decide([piece(text_s=None)], 0.5e6, 0.1) == "cg3"


def test_the_first_piece_of_an_unknown_line_comes_at_a_medium_level():
    assert decide([piece()], None, 0.5) == "cg1"
    assert decide([piece(raw=10, cg2=1)], None, 0.5) == "cg2"
    assert decide([piece(raw=10)], None, 0.5) == "raw"


def first(
    left: Sequence[StreamPiece], mbps: float | None, left_s: float, whole: bool = True, begun: bool = False
) -> str:
    throughput = None if mbps is None else mbps * 1e6
    return decide_first(left, throughput, left_s, is_whole=whole, has_begun=begun)


def test_something_of_all_comes_first_unless_the_line_may_fall_a_lot():
    left = [piece(0, text_s=50.0), piece(1, text_s=50.0)]
    needed = {level: 2 * size / 1e6 for level, size in SIZES.items()}
    assert first(left, None, 10.0) == "cg3"
    assert first(left, 10.0, 1.01 * needed["raw"] / 10) == "cg2"
    assert first(left, 10.0, 1.01 * needed["cg1"] / 10) == "cg3"
    assert first(left, 10.0 / THROUGHPUT_MARGIN, 1.01 * needed["raw"] / 10) == "raw"
    assert first(left, 10.0 / THROUGHPUT_MARGIN, 0.99 * needed["raw"] / 10) == "int8"
    assert first(left, 10.0 / THROUGHPUT_MARGIN, 1.01 * needed["cg2"] / 10) == "cg2"


def test_text_comes_first_only_where_nothing_was_lost_that_it_cannot_mend():
    left = [piece(0, text_s=1.0)]
    assert first(left, 1.0, 2.0) == AS_TEXT
    assert first(left, 1.0, 2.0, whole=False) == "cg3"
    assert first([piece(0, text_s=1.0, **{})], 1.0, 0.5) == "cg3"


def test_a_line_is_asked_for_a_part_of_each_piece_before_that_is_computed_too_late():
    left = [piece(0, text_s=5.0), piece(1, text_s=5.0)]
    assert first(left, 0.01, 1.0) == "cg3"
    assert first(left, 0.01, 1.0, whole=False, begun=True) == AS_TEXT
    assert first(left, 0.2, 1.0, whole=False, begun=True) == "cg3"


def test_what_lost_most_comes_again_as_well_as_all_of_it_can_in_time():
    left = [piece(0), piece(1)]
    assert decide_better(left, ["raw", "int8", "cg1"], 1e6, 17.0) == "raw"
    assert decide_better(left, ["raw", "int8", "cg1"], 1e6, 9.0) == "int8"
    assert decide_better(left, ["raw", "int8", "cg1"], 1e6, 2.0) == "cg1"
    assert decide_better(left, ["raw", "int8", "cg1"], 1e6, 1.0) == ""


def test_a_line_that_stood_still_is_asked_for_a_part_of_what_computing_takes():
    assert first_look_s(piece(text_s=5.0), "cg3", 1.0, has_stalled=True) == STALLED_WAIT * 5.0
    assert first_look_s(piece(text_s=5.0), "cg3", 1e9, has_stalled=True) == NEVER_LATE_S


def test_text_that_cannot_be_timed_is_taken_only_where_there_are_no_levels():
    assert decide([piece(text_s=None)], 1e3, 1e9) == "raw"
    assert decide([StreamPiece((StreamPart(0, 10, {}, None),))], 1e9, 0.0) == AS_TEXT


def test_decoding_counts_and_hides_behind_what_is_still_on_its_way():
    slow = [StreamPiece((StreamPart(at, 1500, {"cg1": 1_000_000}, None, {"cg1": 0.5}),)) for at in range(3)]
    assert delay_s(slow, "cg1", 1e6) == pytest.approx(3.5)
    assert delay_s(slow, "cg1", 1e7) == pytest.approx(1.6)


def test_levels_of_a_piece_are_those_that_all_its_parts_have():
    both = StreamPiece((StreamPart(0, 10, {"raw": 4, "int8": 2, "cg1": 1}), StreamPart(1, 10, {"raw": 4, "cg1": 1})))
    assert both.sizes == {"raw": 8, "cg1": 2}


def test_a_piece_that_lacks_the_level_counts_at_its_own_of_that_rank():
    left = [piece(raw=100, cg1=10), piece(1, raw=100, cg3=6), piece(2, raw=50)]
    assert delay_s(left, "cg1", 1.0) == 10 + 6 + 50


@given(some.lists(some.integers(1, 4000), max_size=30), some.integers(1, 3000))
def test_pieces_are_whole_segments_in_order_and_as_long_as_allowed(tokens, most):
    parts = [StreamPart(at, n, {}) for at, n in enumerate(tokens)]
    cut = pieces(parts, most)
    assert [part for each in cut for part in each.parts] == parts
    for each, after in zip(cut, [*cut[1:], None], strict=False):
        assert each.tokens <= most or len(each.parts) == 1
        assert after is None or each.tokens + after.parts[0].tokens > most


def test_what_is_left_of_a_piece_has_its_share_of_bytes_and_is_computed_whole():
    whole = StreamPiece(tuple(StreamPart(at, 10, {"raw": 40, "cg1": 10}, 1.0, {"cg1": 0.5}) for at in range(3)))
    rest = whole.rest([0, 2], 0.5, ["raw"])
    assert (rest.segments, rest.sizes, rest.text_s, rest.decode_s("cg1")) == ((0, 2), {"cg1": 10}, 2.0, 0.5)
    assert whole.rest([1], 1.0).sizes == {"raw": 40, "cg1": 10}


@given(some.integers(1, 80), some.one_of(some.none(), some.floats(0, 100)))
def test_a_piece_is_read_in_a_few_steps_none_of_which_is_short(n_layers, whole_s):
    at, sizes = 0, []
    while at < n_layers:
        sizes.append(layers_together(n_layers, n_layers - at, whole_s))
        at += sizes[-1]
    assert at == n_layers
    assert 1 <= len(sizes) <= STEPS_PER_PIECE
    assert len(sizes) == 1 or whole_s is None or whole_s / len(sizes) >= STEP_S


def test_a_piece_is_late_after_some_times_what_was_foreseen():
    assert first_look_s(piece(), "int8", 4e6) == pytest.approx(PATIENCE)
    assert first_look_s(piece(), "int8", 4e6, sharing=3) == pytest.approx(3 * PATIENCE)
    assert first_look_s(piece(), "int8", 1e12) == NEVER_LATE_S


def test_on_an_unknown_line_a_piece_is_late_when_it_would_be_computed():
    assert first_look_s(piece(text_s=0.7), "int8", None) == 0.7
    assert first_look_s(piece(text_s=None), "int8", None) is None


def test_a_late_piece_is_given_up_once_waiting_as_long_again_is_worse_than_computing():
    left = [piece(text_s=1.0, int8=4_000_000), piece(1, text_s=1.0, int8=4_000_000)]
    assert not is_given_up(left, 0.0, 4_000_000, 0.9, 0.0)
    assert is_given_up(left, 0.0, 4_000_000, 1.1, 0.0)
    assert not is_given_up([piece(text_s=None)], 0.0, 4_000_000, 100.0, 0.0)


def test_what_may_still_be_in_time_is_waited_for():
    assert is_given_up([piece(text_s=1.0)], 0.0, 4_000_000, 1.1, 1.0)
    assert not is_given_up([piece(text_s=1.0)], 0.0, 4_000_000, 1.1, 1.2)


def test_a_late_step_is_waited_for_where_the_rest_can_come_at_a_lesser_level():
    left = [piece(text_s=3.0, int8=4_000_000, cg3=400_000), piece(1, text_s=3.0, int8=4_000_000, cg3=400_000)]
    assert not is_given_up(left, 0.5, 400_000, 0.5, 1.0)
    only = [piece(text_s=3.0, int8=4_000_000), piece(1, text_s=3.0, int8=4_000_000)]
    assert is_given_up(only, 0.5, 400_000, 0.5, 1.0)


def test_a_step_that_would_come_after_the_deadline_is_late_however_long_computing_takes():
    left = [piece(text_s=None, int8=4_000_000), piece(1, text_s=9.0, int8=4_000_000)]
    assert is_late(left, 0.0, 4_000_000, 1.0, 2.9)
    assert not is_late(left, 0.0, 4_000_000, 1.0, 3.1)


def test_what_is_left_in_the_end_is_waited_for_only_where_computing_it_would_be_late():
    left = [piece(text_s=1.0), piece(1, text_s=1.0)]
    assert spare_s(left, 2 * COMPUTE_MARGIN + 0.01) == 0.0
    assert spare_s(left, 2 * COMPUTE_MARGIN - 0.01) == 2 * COMPUTE_MARGIN - 0.01
    assert spare_s([piece(text_s=None)], 5.0) == 0.0


def test_where_all_is_late_a_piece_is_computed_only_if_that_is_much_sooner():
    at_once = {"is_whole": False, "has_begun": True}
    left = [piece(text_s=3.0, cg3=4_000_000), piece(1, text_s=3.0, cg3=4_000_000)]
    assert decide_first(left, 1e6, 5.0, **at_once) == "cg3"
    assert decide_first(left, 0.6e6, 5.0, **at_once) == AS_TEXT
    assert decide_first(left, 1e6, 7.0, **at_once) == AS_TEXT
