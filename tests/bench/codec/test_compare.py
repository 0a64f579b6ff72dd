"""Every figure that compares levels, and the whole report, run on a tiny model and say what the JSON must."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ragfuse_bench.codec import compare, report, speed
from ragfuse_bench.codec.coded import codecs_of, coded, coder_of, fp16_nbytes, ideas_of
from ragfuse_bench.codec.report import run_codec
from ragfuse_bench.figure import Wanted
from ragfuse_bench.paper import run_paper
from ragfuse_bench.presets import bench_model
from rich.console import Console

from ragfuse import Settings
from ragfuse.errors import InputError
from ragfuse.hf.model import HFModel
from ragfuse.types.levels import LEVEL_NAMES

LOSSY = list(LEVEL_NAMES[1:])


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return bench_model(str(varied_path), "float32", "cpu", varied_path)


@pytest.fixture
def wanted(varied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wanted:
    monkeypatch.setattr(compare, "LENGTHS", (32, 100, 200))
    monkeypatch.setattr(compare, "PIECE_TOKENS", 100)
    monkeypatch.setattr(report, "SHAPE", "tiny")
    settings = Settings(model=str(varied_path), dtype="float32", home=tmp_path)
    return Wanted(settings, (), 1, 0, None, Console(file=io.StringIO(), width=250), True, 200, tmp_path / "kept")


def run(name: str, wanted: Wanted, tmp_path: Path) -> list[dict[str, Any]]:
    result = run_paper(name, wanted, tmp_path / f"{name}.png")
    assert json.loads(json.dumps(result)) == result
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    rows: list[dict[str, Any]] = result["rows"]
    return rows


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


def test_the_other_coder_decodes_to_the_same(model: HFModel) -> None:
    kv = model.encode(model.tokens("The keeper counted forty ships in one night."))
    codecs = codecs_of(model)
    assert {name.partition("/")[0] for name in codecs.others} == set(LOSSY[1:])
    for name, codec in codecs.others.items():
        level = codecs.levels[name.partition("/")[0]]
        assert coder_of(codec) != coder_of(level)
        for a, b in zip(coded(codec, kv).kv.layers, coded(level, kv).kv.layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)


def test_the_paper_s_ideas_are_added_one_at_a_time(model: HFModel) -> None:
    codecs = codecs_of(model)
    ideas = ideas_of(model, codecs)
    levels = [codec.level for codec in ideas.values()]  # type: ignore[attr-defined]
    ideas_by_name = ("deltas", "layerwise", "grouping", "coder", "outlier_factor")
    changed = [{name for name in ideas_by_name if getattr(a, name) != getattr(b, name)} for a, b in pairwise(levels)]
    paper = [{"grouping"}, {"deltas"}, {"layerwise"}, {"deltas"}, {"outlier_factor"}, {"layerwise"}]
    assert changed == [*paper, set(), set(), {"coder"}, set()]
    tables = [codec.tables.digest for codec in ideas.values()]  # type: ignore[attr-defined]
    plain, asked, ours, left = dict.fromkeys(tables)
    assert tables == [plain] * 7 + [asked, ours, ours, left]
    assert ours == codecs.tables.digest


def test_size_and_quality_of_every_level_stand_for_all_sets_and_for_each(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("cg-fig9", wanted, tmp_path)
    names = [*LOSSY, "int4", "int3"]
    assert [(row["dataset"], row["level"]) for row in rows] == [
        (dataset, name) for dataset in ("all", "held-out", "demo") for name in names
    ]
    of = {row["level"]: row for row in rows if row["dataset"] == "all"}
    assert of["int8"]["x_vs_int8"] == 1.0
    assert of["int3"]["bytes_over_fp16"] < of["int4"]["bytes_over_fp16"] < of["int8"]["bytes_over_fp16"]
    assert of["int8"]["kl"] < of["int4"]["kl"] < of["int3"]["kl"]
    assert all(0 <= row["top1"] <= 1 for row in rows)


SIZES = {"bytes_over_fp16": 0.5, "bits_a_value": 8.0, "x_vs_int8": 1.0, "kl": 0.1, "top1": 0.9}
SIZES |= {"nats_more": 0.0, "contexts": 1, "tokens": 9}
MEASURED = {
    "levels": [{"name": "cg1", "default_coder": kept, "coder": kept, **SIZES} for kept in (True, False)],
    "baselines": [{"name": "int4", "default_coder": True, **SIZES}],
    "by_set": [{"dataset": "squad", "name": "cg1", **SIZES}],
    "ideas": [{"name": "the paper", **SIZES}],
    "model": "measured-there",
    "absent": ["No triviaqa there."],
    "date": "2026-01-01",
}


def test_what_the_codec_bench_wrote_is_shown_as_it_was_measured(wanted: Wanted, tmp_path: Path) -> None:
    path = tmp_path / "codec.json"
    path.write_text(json.dumps(MEASURED))
    result = run_paper("cg-fig9", replace(wanted, sets=(str(path),)), None)
    named = [("all", "cg1"), ("all", "int4"), ("squad", "cg1")]
    assert result["rows"] == [{"dataset": dataset, "level": level, **SIZES} for dataset, level in named]
    assert (result["model"], result["date"], "machine" in result) == ("measured-there", "2026-01-01", False)
    assert (result["note"], result["absent"]) == ("drawn from codec.json", ["No triviaqa there."])
    assert run("cg-fig15", replace(wanted, sets=(str(path),)), tmp_path) == [{"idea": "the paper", **SIZES}]


@pytest.mark.parametrize("figure", ["cg-fig9", "cg-fig15"])
def test_a_file_that_the_codec_bench_did_not_write_is_refused(figure: str, wanted: Wanted, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"deadlines": []}')
    with pytest.raises(InputError, match=r"other\.json.*bench codec --json"):
        run_paper(figure, replace(wanted, sets=(str(path),)), None)


@pytest.mark.slow
def test_text_and_levels_are_timed_over_links_of_every_speed(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("cg-fig11", wanted, tmp_path)
    assert [row["gbps"] for row in rows] == sorted(compare.GBPS)
    for name in ("int8_s", "default_s"):
        assert [row[name] for row in rows] == sorted((row[name] for row in rows), reverse=True)
    assert all(row["default_s"] < row["int8_s"] for row in rows[:3])


@pytest.mark.slow
def test_requests_and_lengths_have_their_rows(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("cg-fig12", wanted, tmp_path)
    assert [row["requests"] for row in rows if row["what"] == "requests"] == list(compare.REQUESTS)
    assert [row["tokens"] for row in rows if row["what"] == "length"] == [32, 100, 200]


@pytest.mark.slow
def test_the_time_is_broken_down_and_the_bytes_of_all_levels_are_added(wanted: Wanted, tmp_path: Path) -> None:
    rows = {row["method"]: row for row in run("cg-fig14", wanted, tmp_path)}
    assert list(rows) == ["text", *LOSSY, "all levels but int8", "fp16"]
    for name in ("text", *LOSSY):
        parts = sum(rows[name][key] for key in ("link_s", "decode_s", "compute_s"))
        assert rows[name]["ttft_s"] == pytest.approx(parts)
    assert rows["all levels but int8"]["mb"] == pytest.approx(sum(rows[name]["mb"] for name in LOSSY[1:]))
    assert rows["fp16"]["mb"] > rows["int8"]["mb"]


@pytest.mark.slow
def test_the_share_of_each_idea_is_a_row_and_rope_in_keys_is_one(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("cg-fig15", wanted, tmp_path)
    assert rows[0]["idea"] == "int8"
    assert rows[-1]["idea"] == "the same, RoPE left in keys"
    assert all(row["bytes_over_fp16"] > 0 and row["kl"] >= 0 for row in rows)
    by = {row["idea"]: row for row in rows}
    assert by["the same by zstd"]["kl"] == pytest.approx(by["the same, layers by what errors cost"]["kl"])


@pytest.mark.slow
def test_the_report_has_what_the_json_must_have(wanted: Wanted, tmp_path: Path) -> None:
    result = run_codec(wanted, 2, tmp_path / "codec.png")
    assert json.loads(json.dumps(result)) == result
    assert (tmp_path / "codec.png").read_bytes().startswith(b"\x89PNG")
    keys = {"name", "coder", "default_coder", "bytes_over_fp16", "x_vs_int8", "kl", "top1", "f1_delta"}
    keys |= {"encode_mbps", "decode_mbps", "decode_over_prefill"}
    assert all(keys <= set(level) for level in (*result["levels"], *result["baselines"]))
    assert [level["name"] for level in result["levels"] if level["default_coder"]] == LOSSY
    assert {level["name"] for level in result["levels"] if not level["default_coder"]} == set(LOSSY[1:])
    assert all({"name", "bytes_over_fp16"} <= set(idea) for idea in result["ideas"])
    assert [(row["level"], row["coder"]) for row in result["shapes"]] == [("int8", ""), ("cg2", "zstd"), ("cg2", "ans")]
    assert all(row["decode_over_prefill"] > 0 for row in result["shapes"])
    assert result["answers"]["raw"]["n"] == 2
    assert any("longchat" in sentence for sentence in result["absent"])
    _the_f1_of_a_model_that_answers_nothing_says_nothing(result)
    _its_figures_are_drawn_without_measuring_again(result, wanted, tmp_path)


def _its_figures_are_drawn_without_measuring_again(result: Mapping[str, Any], wanted: Wanted, tmp_path: Path) -> None:
    path = tmp_path / "codec.json"
    path.write_text(json.dumps(result))
    rows = run("cg-fig9", replace(wanted, sets=(str(path),)), tmp_path)
    assert rows == run("cg-fig9", wanted, tmp_path)
    assert [row["idea"] for row in run("cg-fig15", replace(wanted, sets=(str(path),)), tmp_path)] == [
        idea["name"] for idea in result["ideas"]
    ]


def _the_f1_of_a_model_that_answers_nothing_says_nothing(result: Mapping[str, Any]) -> None:
    assert result["answers"]["raw"]["f1"] < 0.3
    assert all(level["f1_delta"] is None for level in result["levels"])


def test_a_level_is_reached_only_if_it_is_small_and_close_in_all_three() -> None:
    good = {"name": "cg3", "default_coder": True, "x_vs_int8": 3.6, "top1": 0.96, "f1_delta": -0.01}
    assert report.reached([good]) == ["cg3"]
    for spoiled in ({"x_vs_int8": 3.4}, {"top1": 0.94}, {"f1_delta": -0.03}, {"f1_delta": None}):
        assert report.reached([{**good, **spoiled}]) == []


def test_a_shape_of_few_layers_has_the_width_of_the_whole() -> None:
    model = speed.shaped("tiny", "float32", "cpu")
    assert model.n_layers == speed.SHAPE_LAYERS
    assert model.encode([1, 2, 3]).layers[0].keys.shape == (2, 3, 16)


def test_quick_prompts_are_cut_to_the_context(wanted: Wanted, model: HFModel) -> None:
    assert len(compare.piece_of(wanted, model)) == 100
    assert len(compare.piece_of(replace(wanted, context_tokens=60), model)) == 60
