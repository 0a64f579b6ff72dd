"""The swap benchmark: lines counted in the programs themselves, and the whole of it on a tiny
model.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench.dropin import FRAMEWORKS, counted, lines, run_dropin
from ragfuse_bench.options import DropinOptions
from rich.console import Console

BEFORE = ["from a import Theirs", "llm = Theirs(model)", "index = Index(llm)", "return index"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_swap_changes_one_line_and_its_import_and_adds_none(framework: str) -> None:
    found = lines(framework)
    assert (found["changed"], found["imports"], found["added"]) == (1, 1, 0)
    assert found["of"] >= 4


def test_every_changed_line_is_counted() -> None:
    after = [
        "from b import Ours",
        "llm = Ours(model)",
        "index = Other(llm)",
        "fill(index)",
        "return index",
    ]
    assert counted(BEFORE, after) == {"changed": 2, "imports": 1, "added": 1, "of": 3}
    assert counted(BEFORE, BEFORE) == {"changed": 0, "imports": 0, "added": 0, "of": 3}
    assert counted(BEFORE, BEFORE[:-1]) == {"changed": 1, "imports": 0, "added": 0, "of": 3}


def small(model: Path, home: Path, **changes: Any) -> DropinOptions:
    given: dict[str, Any] = {
        "dtype": "float32",
        "questions": 1,
        "splits": 7,
        "chunk_tokens": 64,
        "rounds": 1,
    }
    return DropinOptions(**{**given, "model": str(model), "home": home, **changes})


@pytest.fixture(scope="module")
def found(
    tiny_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], str, Path]:
    home = tmp_path_factory.mktemp("home")
    console = Console(file=io.StringIO(), width=200)
    result = run_dropin(small(tiny_path, home), console)
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue(), home


@pytest.mark.slow
def test_both_models_of_a_framework_are_given_the_same_chunks_and_ours_takes_them_from_the_store(
    found: tuple[dict[str, Any], str, Path],
) -> None:
    result = json.loads(json.dumps(found[0]))
    for name in FRAMEWORKS:
        row = result[name]
        assert row["same_documents"] is True
        assert 0 < row["tokens_reused"] < row["tokens_in_all"]
        assert row["questions"][0]["tokens"] > 6 * 40
        assert row["ttft_ratio"] > 0
        assert 0 <= row["agree"] <= 1
        for side in ("theirs", "ours"):
            assert len(row["questions"][0][side]["wall_s"]["rounds"]) == result["rounds"] == 1


def test_both_frameworks_ask_the_same_prompt(found: tuple[dict[str, Any], str, Path]) -> None:
    one, other = (found[0][name]["questions"][0] for name in FRAMEWORKS)
    assert one["tokens"] == other["tokens"]
