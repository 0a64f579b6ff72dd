"""Seconds over links follow from what was measured: bytes over bandwidth, decoding behind what comes, one factor."""

import pytest
from ragfuse_bench.codec.links import PAPER_LOAD_OVER_TEXT, PIECE_TOKENS, Costs, row, ttft

COSTS = Costs(
    lengths=(500, 1000, 6000),
    prefill_s=(1.0, 2.0, 15.0),
    question_s=0.1,
    nbytes={"int8": 10_000.0, "cg2": 2_500.0},
    decode_s={"int8": 1e-5, "cg2": 1e-4},
    encode_s={"int8": 1e-5, "cg2": 2e-4},
    fp16=20_000.0,
)
METHODS = {"text": "text", "int8": "int8", "default": "cg2"}


def test_loading_8_bits_at_the_paper_s_3_gbit_takes_the_paper_s_share_of_prefilling() -> None:
    found = ttft(COSTS, "int8", 6000, 3.0)
    assert found.link_s / COSTS.text_s(6000) == pytest.approx(PAPER_LOAD_OVER_TEXT)


def test_the_link_takes_bytes_over_bandwidth_for_every_method_alike() -> None:
    slow, fast = (ttft(COSTS, "int8", 6000, gbps).link_s for gbps in (1.0, 10.0))
    assert slow == pytest.approx(10 * fast)
    assert ttft(COSTS, "cg2", 6000, 1.0).link_s == pytest.approx(slow / 4)
    assert ttft(COSTS, "text", 6000, 1.0).link_s < slow / 1000


def test_only_the_last_piece_is_decoded_behind_a_slow_link_and_all_of_them_behind_a_fast_one() -> None:
    last = 6000 - 6000 // PIECE_TOKENS * PIECE_TOKENS or PIECE_TOKENS
    assert ttft(COSTS, "cg2", 6000, 0.1).decode_s == pytest.approx(last * 1e-4)
    assert ttft(COSTS, "cg2", 6000, 1e6).decode_s == pytest.approx(6000 * 1e-4, rel=0.01)


def test_requests_share_the_compute_and_not_the_link() -> None:
    one, four = (ttft(COSTS, "text", 6000, 3.0, requests) for requests in (1, 4))
    assert four.compute_s == pytest.approx(4 * one.compute_s)
    assert four.link_s == one.link_s


def test_the_soonest_method_is_named_as_its_level() -> None:
    assert row(COSTS, METHODS, 6000, 3.0)["fastest"] == "cg2"
    assert row(COSTS, METHODS, 6000, 0.001)["fastest"] == "text"
    found = row(COSTS, METHODS, 6000, 3.0)
    assert found["text_s"] > found["int8_s"] > found["default_s"] > 0


def test_prefilling_is_between_and_beyond_what_was_measured_by_length() -> None:
    assert [COSTS.text_s(tokens) for tokens in (500, 750, 1000)] == pytest.approx([1.0, 1.5, 2.0])
    assert COSTS.text_s(12_000) > 2 * COSTS.text_s(6000)
    assert 0 <= COSTS.text_s(10) < 1.0
