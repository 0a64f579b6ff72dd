"""Peers answer the same prompts, agree on the first token, and say so where they are absent."""

from pathlib import Path

import pytest
from ragfuse_bench.presets import bench_model
from rich.console import Console

from benchmarks.peers.__main__ import run, show
from benchmarks.peers.peers import OFFERS, Offer, Transformers
from benchmarks.peers.prompts import DRAWN, recurring
from ragfuse.settings import Settings


def test_what_is_not_installed_is_left_out_with_a_sentence() -> None:
    absent = Offer("x", "no-such-package", "what", OFFERS[0].make)
    assert absent.absent("m") == "x is left out: no-such-package is not installed (pip install no-such-package)."
    assert not OFFERS[0].absent("m")
    assert Offer("x", "", "what", OFFERS[0].make, "other").absent("m") == "x is left out: it reads other alone."


@pytest.mark.slow
def test_chunks_recur_and_are_ordered_anew(tiny_path: Path) -> None:
    model = bench_model(str(tiny_path), "float32", "cpu", Settings().home)
    cases = recurring(model, 64, 8, 5)
    assert all(len(set(case.chunks)) == DRAWN for case in cases)
    assert len({chunk for case in cases for chunk in case.chunks}) <= 8
    assert len({case.chunks for case in cases}) == len(cases)


@pytest.mark.slow
def test_a_kept_prefix_changes_no_token(tiny_path: Path) -> None:
    model = bench_model(str(tiny_path), "float32", "cpu", Settings().home)
    case = recurring(model, 64, 8, 1)[0]
    plain, keeping = Transformers(model, keeps=False), Transformers(model, keeps=True)
    for ids in ([5, 6, 7, 8, 9], [5, 6, 7, 9, 9, 4], [5, 6, 7, 9, 9, 4], [3, 3]):
        assert keeping.first(case, ids) == plain.first(case, ids)


@pytest.mark.slow
def test_everyone_takes_part(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(str(tiny_path), 64, 8, 2, 1, Console(quiet=True))
    found = {each["peer"]: each for each in result["results"]}
    assert {"hf", "hf-prefix", "ragfuse"} <= found.keys()
    assert found["hf"]["sooner"] == 1.0
    assert found["hf-prefix"]["same_first_token"] == 1.0
    assert result["n"] == 2
    show(result, Console())
    assert "hf-prefix" in capsys.readouterr().out
