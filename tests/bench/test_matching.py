"""The benchmark of matching on few passages: every form has its share, nothing is reused
wrongly.
"""

import io
import json
from pathlib import Path
from typing import Any

from ragfuse_bench.matching import FORMS, run_matching
from ragfuse_bench.options import MatchingOptions
from rich.console import Console


def run(varied_path: Path, home: Path, **options: Any) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=200)
    sizes: dict[str, Any] = {
        "passages": 14,
        "least": 300,
        "longest": 900,
        "prompts": 1,
        "known": (14, 40),
        "rounds": 2,
    }
    result = run_matching(
        MatchingOptions(str(varied_path), home=home, **{**sizes, **options}), console
    )
    assert isinstance(console.file, io.StringIO)
    return json.loads(json.dumps(result)), console.file.getvalue()


def test_every_form_has_its_share_and_nothing_is_reused_wrongly(varied_path: Path, tmp_path: Path):
    result, text = run(varied_path, tmp_path)
    recovered = {row["form"]: row["recovered"] for row in result["forms"]}
    assert set(FORMS) < set(recovered)
    assert min(recovered.values()) > 0.5
    assert recovered["whole"] > 0.98
    assert result["false_reuse"] == 0
    assert [row["known"] for row in result["ms_per_8k"]] == [14, 40]
    assert all(row["ms"] > 0 for row in result["ms_per_8k"])
    assert "Matched ids that differ: 0." in text
