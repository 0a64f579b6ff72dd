"""The benchmark of matching on few passages: every form has its share, nothing is reused
wrongly.
"""

import json
from pathlib import Path

from ragfuse_bench.matching import FORMS, run_matching
from ragfuse_bench.options import MatchingOptions
from rich.console import Console


def test_every_form_has_its_share_and_nothing_is_reused_wrongly(varied_path: Path, tmp_path: Path):
    sizes = {"passages": 14, "least": 300, "longest": 900, "prompts": 1, "rounds": 2}
    options = MatchingOptions(str(varied_path), home=tmp_path, known=(14, 40), **sizes)
    result = json.loads(json.dumps(run_matching(options, Console(quiet=True))))
    recovered = {row["form"]: row["recovered"] for row in result["forms"]}
    assert set(FORMS) < set(recovered)
    assert min(recovered.values()) > 0.5
    assert recovered["whole"] > 0.98
    assert result["false_reuse"] == 0
    assert [row["known"] for row in result["ms_per_8k"]] == [14, 40]
    assert all(row["ms"] > 0 for row in result["ms_per_8k"])
