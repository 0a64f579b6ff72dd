"""How often streams are late, over far more lines than there is time to wait for: see `replay`."""

from random import Random

import pytest
from ragfuse_bench.line import constant
from ragfuse_bench.stream.lines import Course, drawn_by_piece, published

from tests.kits.replay import BASE_S, INT8, OVER_INT8, PIECES, SCALE, TEXT_S, replayed

DRAWN = [drawn_by_piece(seed, PIECES, SCALE) for seed in range(100)]
LINES = [*DRAWN, *published(SCALE, 3.0)]
COMPUTING = [Random(seed).uniform(0.97, 1.05) for seed in range(len(LINES))]
"""How many times as long as foreseen computing takes over each line."""


def late(deadline_s, level=None):
    return sum(
        replayed(line, deadline_s, level, longer)[0] > deadline_s
        for line, longer in zip(LINES, COMPUTING, strict=True)
    )


@pytest.mark.parametrize("level", ["int8", "cg2"])
@pytest.mark.parametrize("gbps", [0.1, 3.0, 50.0])
def test_at_one_level_a_constant_line_takes_what_its_bytes_take(level, gbps):
    rate = gbps * SCALE.bytes_per_gbps
    seconds, stream = replayed(Course("", "constant", constant(rate)), 1.0, level=level)
    assert seconds == pytest.approx(INT8 * OVER_INT8[level] / rate + BASE_S, rel=0.05)
    assert not stream.text


def test_with_time_for_it_all_is_computed():
    seconds, stream = replayed(DRAWN[0], 2 * TEXT_S)
    assert set(stream.text) == set(range(PIECES))
    assert seconds == pytest.approx(TEXT_S + BASE_S, rel=0.01)


@pytest.mark.parametrize("paper_s", [1.0, 2.0])
def test_streams_are_late_a_tenth_as_often_as_8_bits_and_less_often_than_one_level(paper_s):
    deadline_s = paper_s * SCALE.seconds
    refined = late(deadline_s)
    assert refined <= late(deadline_s, level="int8") / 10
    assert refined < late(deadline_s, level="cg2")


def test_what_came_is_there_at_one_level_in_each_layer_or_the_piece_is_computed():
    for line in LINES[:40]:
        _, stream = replayed(line, SCALE.seconds)
        assert set(stream.received) | set(stream.text) == set(range(PIECES))
        assert not set(stream.received) & set(stream.text)
        for segment, (level, nbytes) in stream.received.items():
            steps = [each for each in stream.pieces if segment in each.segments and not each.why]
            assert level in {step.level for step in steps}
            assert nbytes == sum(step.nbytes for step in steps)
