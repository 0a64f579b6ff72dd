"""Prompt Cache's figures and tables on a tiny model, and its sizes beside what a model's own cache takes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ragfuse_bench.figure import Wanted
from ragfuse_bench.modules.figures import PROMPTCACHE
from ragfuse_bench.modules.shapes import SHAPES, Shape, sizes
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from ragfuse import Settings
from tests.bench.kit import drawn
from tests.tiny import CHUNKS


@pytest.fixture
def wanted(varied_path: Path, tmp_path: Path) -> Wanted:
    texts = [{"title": "", "text": chunk} for chunk in CHUNKS[:3]]
    rows = [{"id": i, "question": f"Who is {i}?", "answers": ["x"], "ctxs": texts} for i in range(2)]
    names = []
    for name in ("musique_made", "other"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        names.append(str(path))
    settings = Settings(model=str(varied_path), dtype="float32", home=tmp_path)
    return Wanted(settings, tuple(names), 2, 0, None, Console(file=io.StringIO(), width=200), quick=True)


def run(name: str, wanted: Wanted, tmp_path: Path) -> dict[str, Any]:
    return drawn(name, PROMPTCACHE[name].title, wanted, tmp_path)


def test_every_set_is_timed_both_ways_and_that_no_gpu_is_used_is_said(wanted: Wanted, tmp_path: Path) -> None:
    result = run("pc-fig3", wanted, tmp_path)
    assert [(row["dataset"], row["n"]) for row in result["rows"]] == [("musique_made", 2), ("other", 2)]
    assert all(row["full_s"] > 0 and row["cached_s"] > 0 and row["cached_share"] > 0.5 for row in result["rows"])
    assert {row["device"] for row in result["rows"]} == {"cpu, from host"}
    assert any("No GPU is used" in sentence for sentence in result["absent"])


def test_the_cpu_figure_is_of_the_same_measurements() -> None:
    assert PROMPTCACHE["pc-fig4"].measure is PROMPTCACHE["pc-fig3"].measure


def test_lengths_grow(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("pc-fig5", wanted, tmp_path)["rows"]
    assert len(rows) == 2
    assert rows[0]["tokens"] < rows[1]["tokens"]
    assert all(row["cached_share"] > 0.8 for row in rows)


def test_scores_stand_beside_the_papers_where_it_has_the_set(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("pc-table1", replace(wanted, limit=1), tmp_path)["rows"]
    assert [(row["method"], row["n"]) for row in rows] == [("F1", 1)] * 2
    assert [row["paper_full"] for row in rows] == [7.31, None]
    assert all(row["to_full"] == row["cached"] - row["full"] for row in rows)


def test_a_model_s_own_row_is_measured(wanted: Wanted, tmp_path: Path) -> None:
    *_, mine = run("pc-table2", wanted, tmp_path)["rows"]
    assert mine["mb_per_token"] == 3 * 2 * 2 * 16 * 4 / 2**20  # layers, keys and values, heads, dims, bytes


def test_the_papers_numbers_are_those_of_all_heads_in_mebibytes() -> None:
    for row in sizes():
        assert row["all_heads_mb"] == pytest.approx(row["paper_mb"], rel=0.05, abs=0.006)
        assert row["mb_per_token"] <= row["all_heads_mb"]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_a_shape_s_bytes_are_those_of_a_models_own_cache(heads: tuple[int, int]) -> None:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=heads[0] * 8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    cache = model(torch.tensor([[1, 2, 3, 4, 5]]), use_cache=True).past_key_values
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert Shape("made", 3, *heads, 8, 0.0).nbytes_per_token() == nbytes / 5


def test_every_model_of_the_paper_s_table_is_there() -> None:
    assert [shape.paper for shape in SHAPES] == [0.03, 0.18, 0.5, 0.78, 1.31, 1.87, 2.5, 4.53]
