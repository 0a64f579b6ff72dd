"""The controller's benchmark on a tiny model: what it promises, and how the best ratio of a sweep
is told.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench import controller
from ragfuse_bench.controller import best_ratio, run_controller
from ragfuse_bench.options import ControllerOptions
from rich.console import Console


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    home, console = tmp_path_factory.mktemp("home"), Console(file=io.StringIO(), width=200)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(controller, "SIZES", (24, 32))
        patched.setattr(controller, "SWEEP", (4, 32))
        patched.setattr(controller, "STEP", 0.25)
        sizes = ControllerOptions(model="tiny", mbps=(1.0, 50.0), plans=4, rounds=1, home=home)
        return json.loads(json.dumps(run_controller(sizes, console))), home


@pytest.mark.slow
def test_every_plan_was_foreseen_and_measured(found: tuple[dict[str, Any], Path]):
    result, _ = found
    assert result["plans"] == len(result["by_plan"]) == 4
    assert all(plan["predicted_s"] > 0 and plan["measured_s"] > 0 for plan in result["by_plan"])
    assert 0 <= result["median_abs_err"] <= result["p90_abs_err"]


@pytest.mark.slow
def test_each_speed_has_its_sweep_from_the_least_ratio_on(found: tuple[dict[str, Any], Path]):
    result, _ = found
    assert [row["mbps"] for row in result["by_mbps"]] == [1.0, 50.0]
    for row in result["by_mbps"]:
        ratios = [point["ratio"] for point in row["sweep"]]
        assert ratios[0] == row["least"] == 0.15
        assert ratios == sorted(ratios)
        if not row["refusal"] and not row["unread"]:
            assert row["gap"] == abs(row["chosen"] - row["best"])
    gaps = [row["gap"] for row in result["by_mbps"] if row["gap"] is not None]
    assert result["ratio_gap_max"] == max(gaps, default=None)


@pytest.mark.slow
def test_a_slow_tier_hides_more_recomputing_than_a_fast_one(found: tuple[dict[str, Any], Path]):
    result, _ = found
    slow, fast = result["by_mbps"]
    assert slow["chosen"] > fast["chosen"]


def test_the_best_ratio_is_the_last_before_the_first_delay():
    assert best_ratio([(0.15, 1.0), (0.17, 1.01), (0.19, 0.99), (0.21, 1.05), (0.23, 1.0)]) == 0.19
    assert best_ratio([(0.15, 1.0), (0.17, 1.03)]) == 0.15
