"""Streams over changing lines: pieces are what full prefill computed, and the result says what it is
made of.
"""

from __future__ import annotations

import pytest
import torch
from ragfuse_bench.codec.answers import Judge
from ragfuse_bench.codec.kv import Continued
from ragfuse_bench.options import StreamOptions
from ragfuse_bench.stream.material import Cut, Worth, context_kv, long_readings
from ragfuse_bench.stream.run import METHODS, run_stream
from rich.console import Console

from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.model import HFModel
from ragfuse.load.layers import LayerReader
from ragfuse.plan.evict import lru
from ragfuse.store import KVStore, MemoryTier
from ragfuse.types.plan import is_exact
from tests.plan.kit import plan


@pytest.fixture
def model(engine) -> HFModel:
    return engine.model


def test_a_context_cut_into_pieces_is_what_full_prefill_computed(engine, model):
    ids = tuple(range(40, 100))
    cut = Cut.of(engine.digest, ids, 20)
    prompt, kv = cut.prompt([5, 6, 7]), model.encode(ids)
    with KVStore([MemoryTier(1 << 30, lru)]) as store:
        for key, piece in cut.pieces(kv, model):
            store.put(key, piece)
        found = plan(prompt, store.lookup(cut.keys))
        assert [is_exact(prompt, fetch) for fetch in found.fetches] == [True] * 3
        runs = [
            CachedRun(at, *prompt.spans[at], prompt.segments[at].start, blend=False)
            for at in range(3)
        ]
        with LayerReader(store, found.fetches, model.n_layers) as reader:
            prefill = model.fuse(prompt.token_ids, prompt.positions, runs, reader, "none", 0.0)
    full = model.full_prefill(prompt.token_ids)
    torch.testing.assert_close(prefill.logits, full.logits, rtol=1e-4, atol=1e-4)
    for again, layer in zip(context_kv(prefill, len(ids)).layers, kv.layers, strict=True):
        torch.testing.assert_close(again.keys, layer.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again.values, layer.values, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_result_says_how_often_each_way_was_late(varied_path, tmp_path):
    options = StreamOptions(
        model=str(varied_path),
        tokens=600,
        piece_tokens=150,
        contexts=1,
        questions=1,
        traces=4,
        deadlines=(0.5, 50.0),
        curve=(3.0,),
        home=tmp_path,
    )
    result = run_stream(options, Console(quiet=True))
    assert result["traces"] == 4
    assert [set(each["violations"]) for each in result["deadlines"]] == [set(METHODS)] * 2
    assert all(
        0 <= share <= 1 for each in result["deadlines"] for share in each["violations"].values()
    )
    assert result["deadlines"][1]["violations"]["adaptive"] == 0
    assert result["ttft_x_vs_text"] > 0


def test_raw_kv_is_worth_what_it_is_compared_with(model):
    (reading,) = long_readings(model, 1000, 1, 2)
    kv = model.encode(reading.token_ids)
    judge = Judge(model, reading, kv)
    found, raw = Worth.of(judge.rows(kv)), Worth.of(judge.raw)
    assert (found.f1, found.top1) == (raw.f1, 1.0)
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert Continued(model, kv).n_tokens == len(reading.token_ids)
