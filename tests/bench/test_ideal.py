"""The formulas against numbers worked out by hand."""

import pytest
from ragfuse_bench.ideal import Work

SIX = Work(layers=24, chunks=6, chunk_tokens=512, suffix=32, ratio=0.15)


def test_all_chunks_count_as_context() -> None:
    # 24 / (1 + 23 * (0.15 * 3072 + 32) / 3104) = 24 / (1 + 23 * 492.8 / 3104)
    assert SIX.ideal_speedup == pytest.approx(24 / 4.651546, rel=1e-6)
    assert SIX.ideal_speedup == pytest.approx(5.16, abs=0.005)


def test_an_exact_prefix_is_never_computed() -> None:
    # layer 0 computes 2592 rows, 23 layers 0.15 * 2560 + 32 = 416 rows: 74496 / (2592 + 9568)
    assert SIX.ideal_prefix_aware == pytest.approx(74496 / 12160)
    assert SIX.ideal_prefix_aware == pytest.approx(6.13, abs=0.005)


def test_a_static_policy_computes_no_layer_in_full() -> None:
    lego = Work(layers=24, chunks=6, chunk_tokens=512, suffix=32, ratio=16 / 512, check_layer=0)
    assert lego.ideal_speedup == pytest.approx(3104 / (6 * 16 + 32))
    assert lego.ideal_prefix_aware == pytest.approx(3104 / (5 * 16 + 32))


def test_asking_the_query_costs_its_rows_once_more() -> None:
    query = Work(
        layers=10, chunks=2, chunk_tokens=100, suffix=20, ratio=0.1, check_layer=0, look=True
    )
    assert query.ideal_speedup == pytest.approx(220 / (0.1 * 200 + 20 + 0.7 * 20))
