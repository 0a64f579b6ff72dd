"""AttentionStore's figures that need no queue: loading through a read buffer, tasks on a document, truncation."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragfuse_bench.figure import Wanted
from ragfuse_bench.paper import run_paper
from ragfuse_bench.sessions.loading import BATCH, LAYERS, LOAD_S, PAST, SERVER, layer_times, preloaded_s
from rich.console import Console

from ragfuse import Settings
from ragfuse.plan.look_ahead import read_buffer


@pytest.fixture
def wanted(tiny_path, tmp_path):
    settings = Settings(model=str(tiny_path), dtype="float32", home=tmp_path)
    return Wanted(settings, ("held-out",), 1, 0, None, Console(file=StringIO(), width=200), True, 600)


def slow_preloaded(layers, load_ticks, compute_ticks, buffered):
    """Tick by tick: a reader with one layer at hand, a model that computes the next layer once that is there."""
    there, done, reading, computing, tick = min(buffered, layers), 0, 0, 0, 0
    while done < layers:
        if there < layers:
            reading += 1
        if computing or done < there:
            computing += 1
        if computing == compute_ticks:
            done, computing = done + 1, 0
        if reading == load_ticks:
            there, reading = there + 1, 0
        tick += 1
    return tick


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 7))
def test_layers_are_computed_once_they_are_there_and_in_order(layers, load, compute, buffered):
    assert preloaded_s(layers, load, compute, buffered) == slow_preloaded(layers, load, compute, buffered)


@given(st.integers(0, 2000), st.integers(1, 2000))
def test_with_a_read_buffer_no_prefill_waits_for_more_than_a_layer_s_rounding(past, new):
    load_s, compute_s = layer_times(past, new)
    nbytes = read_buffer(LOAD_S, past, SERVER.prefill_s, new, SERVER.token_bytes / LOAD_S)
    assert nbytes == pytest.approx(max(0.0, past - new * SERVER.prefill_s / LOAD_S) * SERVER.token_bytes, abs=2)
    layer = past * SERVER.token_bytes / LAYERS
    buffered = -int(-nbytes // layer) if layer else 0
    computed_s = LAYERS * compute_s
    assert preloaded_s(LAYERS, load_s, compute_s, buffered) <= (computed_s + load_s) * 1.001
    if buffered > 1:
        assert preloaded_s(LAYERS, load_s, compute_s, buffered - 1) > computed_s


def test_the_paper_s_buffers_come_out_near_what_it_says(wanted, tmp_path):
    rows = {row["what"]: row for row in run_paper("as-fig19", wanted, tmp_path / "19.png")["rows"]}
    assert rows["0 layers"]["saved"] == pytest.approx(0.35, abs=0.06)
    best = next(row for name, row in rows.items() if "S_buf" in name)
    assert best["saved"] == pytest.approx(0.61, abs=0.1)
    assert best["prefill_s"] == pytest.approx(LAYERS * layer_times(PAST, 100)[1], rel=0.1)
    assert (BATCH, (tmp_path / "19.png").stat().st_size > 1000) == (16, True)


def test_less_that_is_new_saves_more(wanted):
    rows = run_paper("as-fig18", wanted, None)["rows"]
    assert [row["what"] for row in rows] == ["500/500", "600/400", "700/300", "800/200", "900/100"]
    saved = [row["saved"] for row in rows]
    assert saved == sorted(saved)
    assert all(row["ahead_s"] < row["loaded_s"] < row["recompute_s"] for row in rows)


@pytest.mark.slow
def test_tasks_on_a_document_reuse_it(wanted, tmp_path):
    result = run_paper("as-fig25", wanted, tmp_path / "25.png")
    assert [row["document"] for row in result["rows"]] == [100, 200, 600]
    tokens = [row["tokens"] for row in result["rows"]]
    assert tokens == sorted(tokens)
    assert all(row["recompute_s"] > 0 < row["ttft_s"] for row in result["rows"])
    json.dumps(result)


def test_table_1_has_all_four_ways(wanted, tmp_path):
    (row,) = run_paper("as-table1", wanted, tmp_path / "1.png")["rows"]
    assert row["kept"] == pytest.approx(row["recomputed"], rel=0.5)
    assert row["delta"] == pytest.approx(row["kept"] - row["recomputed"])
    for other in ("naive", "without_sinks"):
        assert row[other] != pytest.approx(row["kept"], rel=1e-6)
    assert row["dropped"] > 0
