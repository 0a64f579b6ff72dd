"""How seconds grow, and which prompts the cache's worth is told on."""

from __future__ import annotations

import pytest
from ragfuse_bench.modules.lengths import LONG, MOSTLY, growth, mostly_cached, notes
from rich.console import Console

from ragfuse.calibration.runner import Runner
from ragfuse.errors import InputError


@pytest.mark.parametrize("power", [1, 1.5, 2])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    rows = [{"tokens": n, "s": 0.003 * n**power} for n in (512, 1000, 3072)]
    assert growth(rows, "s") == pytest.approx(power)


def test_of_one_length_no_growth_is_told() -> None:
    assert growth([{"tokens": 512, "s": 1.0}] * 2, "s") is None


def test_the_worth_is_told_on_a_prompt_of_which_no_more_is_cached_than_is_said(engine) -> None:
    row = mostly_cached(engine, Runner(1, engine.model.device, Console(quiet=True)))
    assert row["tokens"] > LONG
    assert MOSTLY <= row["cached_share"] < MOSTLY + 0.005
    assert row["ttft_x"] > 1
    assert engine.schemas.ls() == []


def test_notes_have_as_many_tokens_as_asked_and_each_text_once(engine) -> None:
    found = notes(engine, 1500)
    assert sum(len(engine.tokens(text)) for text in found) == pytest.approx(1500, rel=0.02)
    assert len(set(found)) == len(found) > 1


def test_more_notes_than_there_are_is_told(engine) -> None:
    with pytest.raises(InputError, match="Wanted text of 90,000,000 tokens"):
        notes(engine, 90_000_000)
