"""The controller's benchmark on a tiny model: what it promises, and how the best ratio of a sweep
is told.
"""

import json
from pathlib import Path

import pytest
from ragfuse_bench import controller
from ragfuse_bench.controller import run_controller
from ragfuse_bench.options import ControllerOptions
from rich.console import Console


@pytest.mark.slow
def test_every_plan_is_foreseen_and_measured_and_a_slow_tier_hides_more_recomputing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("SIZES", (24, 32)), ("SWEEP", (4, 32)), ("STEP", 0.25)):
        monkeypatch.setattr(controller, name, value)
    options = ControllerOptions(model="tiny", mbps=(1.0, 50.0), plans=4, rounds=1, home=tmp_path)
    result = json.loads(json.dumps(run_controller(options, Console(quiet=True))))
    assert result["plans"] == len(result["by_plan"]) == 4
    assert all(plan["predicted_s"] > 0 and plan["measured_s"] > 0 for plan in result["by_plan"])
    slow, fast = result["by_mbps"]
    assert (slow["mbps"], fast["mbps"]) == (1.0, 50.0)
    assert slow["chosen"] > fast["chosen"]
    gaps = [row["gap"] for row in (slow, fast) if row["gap"] is not None]
    assert result["ratio_gap_max"] == max(gaps, default=None)
