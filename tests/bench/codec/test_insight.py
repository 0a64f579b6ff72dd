"""The statistics say what is known of made-up values, and every figure runs on a tiny model."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ragfuse_bench.codec.figures import CACHEGEN
from ragfuse_bench.codec.insight import PARTS
from ragfuse_bench.codec.statistics import Entropies, bits, variance_of
from ragfuse_bench.figure import Wanted
from ragfuse_bench.paper import run_paper
from rich.console import Console

from ragfuse import Settings
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.profiles import ModelProfile


def test_deltas_of_independent_values_vary_twice_as_much_and_of_slow_ones_far_less() -> None:
    noise = torch.randn(4, 4000, generator=torch.Generator().manual_seed(0))
    found = variance_of(noise)
    assert found.delta / found.layer == pytest.approx(2.0, rel=0.05)
    assert found.anchor / found.layer == pytest.approx(2.0, rel=0.1)
    slow = variance_of(noise.cumsum(1))
    assert slow.delta < slow.anchor < slow.layer / 10


def test_what_a_channel_s_mean_explains_is_told_from_what_deltas_do() -> None:
    rows = torch.randn(4, 4000, generator=torch.Generator().manual_seed(0)) + torch.tensor([[-30.0], [0], [9], [50]])
    found = variance_of(rows)
    assert found.layer > 100
    assert found.channel == pytest.approx(1.0, rel=0.05)
    assert found.delta == pytest.approx(2.0, rel=0.05)


def test_bits_are_those_of_a_known_distribution_weighed_by_group() -> None:
    assert bits(torch.tensor([[4, 4, 4, 4]])) == pytest.approx(2.0)
    assert bits(torch.tensor([[8, 0], [2, 2]])) == pytest.approx(4 / 12)


def test_grouping_tells_where_groups_differ_and_only_there() -> None:
    n = 400
    channels = torch.tensor([-8.0, 8.0]).repeat(3)[None, None].expand(1, n, 6)
    noise = torch.randn(2, 1, n, 6, generator=torch.Generator().manual_seed(0))
    kv = ChunkKV(tuple(LayerKV(channels + noise[at], 40.0 * at + noise[at]) for at in range(2)))
    counted = Entropies(dict.fromkeys(PARTS, 0.5))
    counted.add(kv, ModelProfile("m", 2))
    found = counted.result()
    told = {key: found[key[0], "none"] - value for key, value in found.items()}
    assert told["keys", "channel"] == pytest.approx(1.0, abs=0.1)
    assert told["keys", "layer"] == pytest.approx(0.0, abs=0.05)
    assert told["values", "layer"] == pytest.approx(1.0, abs=0.1)
    assert told["values", "channel"] == pytest.approx(0.0, abs=0.05)
    assert found["keys", "channel and layer"] <= found["keys", "channel"]
    assert math.isfinite(found["keys", "token"])


@pytest.fixture
def wanted(varied_path: Path, tmp_path: Path) -> Wanted:
    settings = Settings(model=str(varied_path), dtype="float32", home=tmp_path)
    console = Console(file=io.StringIO(), width=200)
    return Wanted(settings, ("held-out",), 1, 0, None, console, True, 200, tmp_path / "kept")


def run(name: str, wanted: Wanted, tmp_path: Path) -> list[dict[str, Any]]:
    result = run_paper(name, wanted, tmp_path / f"{name}.png")
    assert json.loads(json.dumps(result)) == result
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(wanted.console.file, io.StringIO)
    printed = wanted.console.file.getvalue()
    assert CACHEGEN[name].title in printed
    assert "The paper:" in printed
    assert "Not at hand" in printed
    assert any("longchat" in sentence for sentence in result["absent"])
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def test_every_layer_and_part_has_its_variances_and_the_mean_stands_first(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("cg-fig3", wanted, tmp_path)
    assert [(row["part"], row["layer"]) for row in rows[:3]] == [(part, "mean") for part in PARTS]
    assert [(row["part"], row["layer"]) for row in rows[3:]] == [(part, str(at)) for part in PARTS for at in range(3)]
    assert all(row["over_delta"] > 0 and row["own_over_anchor"] > 0 and row["n"] == 2 for row in rows)


def test_rounding_all_layers_costs_more_than_any_group(wanted: Wanted, tmp_path: Path) -> None:
    *groups, every = run("cg-fig4", wanted, tmp_path)
    assert [row["layers"] for row in groups] == ["0-0", "1-1", "2-2"]
    assert every["layers"] == "0-2"
    assert every["kl"] > max(row["kl"] for row in groups) > 0


def test_groups_of_channel_and_layer_tell_the_most(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("cg-fig5", wanted, tmp_path)
    assert [row["part"] for row in rows] == list(PARTS)
    for row in rows:
        assert row["channel_and_layer"] <= min(row["channel"], row["layer"]) <= row["none"]
        assert row["token"] <= row["none"] + 1e-9


def test_kept_kv_is_taken_by_the_next_figure(wanted: Wanted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("cg-fig3", wanted, tmp_path)
    monkeypatch.setattr("ragfuse_bench.codec.kv.Bank._keep", lambda *_: pytest.fail("it was computed twice"))
    assert run("cg-fig3", wanted, tmp_path) == first
