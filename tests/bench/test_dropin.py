"""The swap benchmark: lines counted in the programs themselves, and the whole of it on a tiny
model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench.dropin import FRAMEWORKS, lines, run_dropin
from ragfuse_bench.options import DropinOptions
from rich.console import Console


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_swap_changes_one_line_and_its_import_and_adds_none(framework: str) -> None:
    found = lines(framework)
    assert (found["changed"], found["imports"], found["added"]) == (1, 1, 0)
    assert found["of"] >= 4


def test_both_frameworks_ask_alike_and_ours_takes_its_chunks_from_the_store(
    tiny_path: Path, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"questions": 1, "splits": 7, "chunk_tokens": 64, "rounds": 1}
    options = DropinOptions(model=str(tiny_path), dtype="float32", home=tmp_path, **sizes)
    result = json.loads(json.dumps(run_dropin(options, Console(quiet=True))))
    assert len({result[name]["questions"][0]["tokens"] for name in FRAMEWORKS}) == 1
    for name in FRAMEWORKS:
        row = result[name]
        assert row["same_documents"] is True
        assert 0 < row["tokens_reused"] < row["tokens_in_all"]
        assert row["questions"][0]["tokens"] > 6 * 40
        for side in ("theirs", "ours"):
            assert len(row["questions"][0][side]["wall_s"]["rounds"]) == result["rounds"] == 1
