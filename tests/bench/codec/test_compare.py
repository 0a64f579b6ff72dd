"""Codecs, levels and the whole report, on a tiny model."""

import json
from pathlib import Path

import pytest
from ragfuse_bench.codec import report
from ragfuse_bench.codec.coded import codecs_of, coded, fp16_nbytes
from ragfuse_bench.codec.report import run_codec
from ragfuse_bench.options import CodecOptions
from ragfuse_bench.presets import bench_model
from rich.console import Console

from ragfuse import Settings
from ragfuse.hf.model import HFModel
from ragfuse.types.choices import LEVEL_NAMES

LOSSY = list(LEVEL_NAMES[1:])


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return bench_model(str(varied_path), "float32", "cpu", varied_path)


def test_every_codec_gives_the_kv_back_as_near_as_its_bins_and_counts_its_bytes(
    model: HFModel,
) -> None:
    kv = model.encode(
        model.tokens("The keeper counted forty ships in one night; its door is green. " * 3)
    )
    codecs, away = codecs_of(model), {}
    for name, codec in codecs.all.items():
        done = coded(codec, kv)
        assert 0 < done.nbytes < fp16_nbytes(kv) * 1.1
        away[name] = max(
            float((a.keys - b.keys).norm() / a.keys.norm())
            for a, b in zip(kv.layers, done.kv.layers, strict=True)
        )
    assert away["int8"] < away["int4"] < away["int3"]
    assert sorted(LOSSY[1:], key=away.__getitem__) == LOSSY[1:]


@pytest.mark.slow
def test_the_report_has_what_the_json_must_have(
    varied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PIECE_TOKENS", 100)
    settings = Settings(model=str(varied_path), dtype="float32", home=tmp_path)
    options = CodecOptions(contexts=1, context_tokens=200, questions=2, rounds=1)
    result = run_codec(settings, options, Console(quiet=True))
    assert json.loads(json.dumps(result)) == result
    keys = {"name", "bytes_over_fp16", "x_vs_int8", "kl", "top1", "f1_delta"}
    keys |= {"encode_mbps", "decode_mbps", "decode_over_prefill"}
    assert all(keys <= set(level) for level in (*result["levels"], *result["baselines"]))
    assert [level["name"] for level in result["levels"]] == LOSSY
    assert result["answers"]["raw"]["n"] == 2
    # the F1 of a model that answers nothing says nothing
    assert result["answers"]["raw"]["f1"] < 0.3
    assert all(level["f1_delta"] is None for level in result["levels"])
    rows = {row["name"]: row for row in (*result["levels"], *result["baselines"])}
    int8, int4, int3 = (rows[name] for name in ("int8", "int4", "int3"))
    assert int8["x_vs_int8"] == 1.0
    assert int3["bytes_over_fp16"] < int4["bytes_over_fp16"] < int8["bytes_over_fp16"]
    assert int8["kl"] < int4["kl"] < int3["kl"]
