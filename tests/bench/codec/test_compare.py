"""Codecs, levels and the whole report, on a tiny model."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ragfuse_bench.codec import report, speed
from ragfuse_bench.codec.coded import codecs_of, coded, fp16_nbytes, ideas_of
from ragfuse_bench.codec.few_bits import FewBits
from ragfuse_bench.codec.report import run_codec
from ragfuse_bench.codec.wanted import Wanted
from ragfuse_bench.presets import bench_model
from rich.console import Console

from ragfuse import Settings
from ragfuse.codec import LayerMeta
from ragfuse.hf.model import HFModel
from ragfuse.types.levels import LEVEL_NAMES
from tests.codec.kit import layer
from tests.reference import uniform

LOSSY = list(LEVEL_NAMES[1:])


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return bench_model(str(varied_path), "float32", "cpu", varied_path)


@pytest.fixture
def wanted(varied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wanted:
    monkeypatch.setattr("ragfuse_bench.codec.wanted.PIECE_TOKENS", 100)
    monkeypatch.setattr(report, "SHAPE", "tiny")
    settings = Settings(model=str(varied_path), dtype="float32", home=tmp_path)
    return Wanted(settings, Console(file=io.StringIO(), width=250), None, 1, 200, tmp_path / "kept", quick=True)


def test_every_codec_gives_the_kv_back_as_near_as_its_bins_and_counts_its_bytes(model: HFModel) -> None:
    kv = model.encode(model.tokens("The keeper counted forty ships in one night; its door is green. " * 3))
    codecs, away = codecs_of(model), {}
    for name, codec in codecs.all.items():
        done = coded(codec, kv)
        assert 0 < done.nbytes < fp16_nbytes(kv) * 1.1
        away[name] = max(
            float((a.keys - b.keys).norm() / a.keys.norm()) for a, b in zip(kv.layers, done.kv.layers, strict=True)
        )
    assert away["int8"] < away["int4"] < away["int3"]
    assert sorted(LOSSY[1:], key=away.__getitem__) == LOSSY[1:]


@pytest.mark.parametrize("bits", [4, 3])
def test_few_bits_give_back_what_their_slow_twin_does(bits: int) -> None:
    before = layer(3, 13, dtype=torch.bfloat16)
    blob = FewBits(bits).encode(before)
    after = FewBits(bits).decode(blob, LayerMeta.of(before, blob))
    for found, given in ((after.keys, before.keys), (after.values, before.values)):
        assert torch.equal(found.float(), uniform(given, bits).to(torch.bfloat16).float())


def test_the_paper_s_ideas_are_added_one_at_a_time(model: HFModel) -> None:
    codecs = codecs_of(model)
    ideas = ideas_of(model, codecs)
    levels = [codec.level for codec in ideas.values()]  # type: ignore[attr-defined]
    ideas_by_name = ("deltas", "layerwise", "outlier_factor")
    changed = [{name for name in ideas_by_name if getattr(a, name) != getattr(b, name)} for a, b in pairwise(levels)]
    paper = [{"deltas"}, {"layerwise"}, {"deltas"}, {"outlier_factor"}, {"layerwise"}]
    assert changed == [*paper, set(), set(), set()]
    tables = [codec.tables.digest for codec in ideas.values()]  # type: ignore[attr-defined]
    plain, asked, ours, left = dict.fromkeys(tables)
    assert tables == [plain] * 6 + [asked, ours, left]
    assert ours == codecs.tables.digest


@pytest.mark.slow
def test_the_report_has_what_the_json_must_have(wanted: Wanted, tmp_path: Path) -> None:
    result = run_codec(wanted, 2, tmp_path / "codec.png")
    assert json.loads(json.dumps(result)) == result
    assert (tmp_path / "codec.png").read_bytes().startswith(b"\x89PNG")
    keys = {"name", "bytes_over_fp16", "x_vs_int8", "kl", "top1", "f1_delta"}
    keys |= {"encode_mbps", "decode_mbps", "decode_over_prefill"}
    assert all(keys <= set(level) for level in (*result["levels"], *result["baselines"]))
    assert [level["name"] for level in result["levels"]] == LOSSY
    assert all({"name", "bytes_over_fp16"} <= set(idea) for idea in result["ideas"])
    assert [row["level"] for row in result["shapes"]] == ["int8", "cg2"]
    assert all(row["decode_over_prefill"] > 0 for row in result["shapes"])
    assert result["answers"]["raw"]["n"] == 2
    assert any("longchat" in sentence for sentence in result["absent"])
    _the_f1_of_a_model_that_answers_nothing_says_nothing(result)
    _smaller_levels_are_further_away({row["name"]: row for row in (*result["levels"], *result["baselines"])})


def _smaller_levels_are_further_away(of: Mapping[str, Any]) -> None:
    assert of["int8"]["x_vs_int8"] == 1.0
    assert of["int3"]["bytes_over_fp16"] < of["int4"]["bytes_over_fp16"] < of["int8"]["bytes_over_fp16"]
    assert of["int8"]["kl"] < of["int4"]["kl"] < of["int3"]["kl"]


def _the_f1_of_a_model_that_answers_nothing_says_nothing(result: Mapping[str, Any]) -> None:
    assert result["answers"]["raw"]["f1"] < 0.3
    assert all(level["f1_delta"] is None for level in result["levels"])


def test_a_level_is_reached_only_if_it_is_small_and_close_in_all_three() -> None:
    good = {"name": "cg3", "x_vs_int8": 3.6, "top1": 0.96, "f1_delta": -0.01}
    assert report.reached([good]) == ["cg3"]
    for spoiled in ({"x_vs_int8": 3.4}, {"top1": 0.94}, {"f1_delta": -0.03}, {"f1_delta": None}):
        assert report.reached([{**good, **spoiled}]) == []


def test_a_shape_of_few_layers_has_the_width_of_the_whole() -> None:
    model = speed.shaped("tiny", "float32", "cpu")
    assert model.n_layers == speed.SHAPE_LAYERS
    assert model.encode([1, 2, 3]).layers[0].keys.shape == (2, 3, 16)


def test_quick_prompts_are_cut_to_the_context(wanted: Wanted, model: HFModel) -> None:
    assert len(wanted.piece(model)) == 100
    assert len(replace(wanted, context_tokens=60).piece(model)) == 60
