"""The benchmark of modules on a tiny model: what it says, and that both ways are what they are
called.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ragfuse_bench.modules.asked import first_logits, registered
from ragfuse_bench.modules.cases import ModuleCase
from ragfuse_bench.modules.run import run_modules
from ragfuse_bench.options import ModuleOptions
from rich.console import Console

from ragfuse import Ask, Engine, Settings
from ragfuse.schemas.pml import parse_prompt, parse_schema
from tests.kits.tiny import CHUNKS

KEYS = {"slope", "by_set", "cases"}
DOORS = """<schema name="doors">All that is known of the doors of lighthouses:
<module name="green">The northern one is green.</module><module name="red">The southern one is red.</module></schema>"""


@pytest.fixture
def doors() -> ModuleCase:
    prompt = '<prompt schema="doors"><green/><red/>Which door is red?</prompt>'
    return ModuleCase(
        "doors", parse_schema(DOORS), parse_prompt(prompt), ("the southern one",), max_tokens=6
    )


@pytest.fixture
def sets(tmp_path: Path) -> tuple[str, ...]:
    texts = [{"title": "", "text": chunk} for chunk in CHUNKS[:3]]
    rows = [
        {"id": i, "question": f"Who is {i}?", "answers": ["x"], "ctxs": texts} for i in range(3)
    ]
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return (str(path),)


def quiet() -> Console:
    return Console(quiet=True)


def test_a_tiny_run_has_the_wanted_keys_and_says_them(
    varied_path: Path, tmp_path: Path, sets
) -> None:
    settings = Settings(model=str(varied_path), dtype="float32", home=tmp_path)
    options = ModuleOptions(uses=(), sets=sets, limit=2, lengths=(300, 2048), rounds=1)
    result = run_modules(settings, options, quiet())
    assert set(result) >= KEYS
    assert json.loads(json.dumps(result))["by_set"] == result["by_set"]
    assert [set(row) >= {"tokens", "full_s", "cached_s"} for row in result["slope"]] == [True, True]
    assert result["slope"][1]["ttft_x"] > 1
    assert [row["name"] for row in result["cases"]] == sorted(
        row["name"] for row in result["cases"]
    )
    assert all(
        row["cached_share"] > 0.5 and row["answer_full"] and row["answer_cached"]
        for row in result["cases"]
    )
    assert result["by_set"][0]["n"] == len(result["cases"]) == 2


def test_both_ways_hold_the_same_tokens_at_the_same_positions(
    engine: Engine, doors: ModuleCase
) -> None:
    with registered(engine, doors.schema):
        full, cached = (
            first_logits(engine, doors.request, ask) for ask in (Ask(reuse=False), Ask())
        )
    assert full.plan.prompt.token_ids == cached.plan.prompt.token_ids
    assert full.plan.prompt.positions.tolist() == cached.plan.prompt.positions.tolist()
    assert full.plan.fallback_reason
    assert len(cached.plan.fetches) == 3
    assert engine.schemas.ls() == []
