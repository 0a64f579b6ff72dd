"""Fair rounds and two clocks."""

import pytest
import torch
from ragfuse_bench.rounds import Runner, Times, speedup
from rich.console import Console

from ragfuse.calibration.runner import Sample


def test_cases_take_turns_after_one_warm_up_each() -> None:
    seen: list[str] = []
    runner = Runner(3, torch.device("cpu"), Console(quiet=True))
    times = runner.measure({name: lambda name=name: seen.append(name) for name in "abc"})
    assert seen == list("abc" * 4)
    assert [len(times[name].samples) for name in "abc"] == [3, 3, 3]


def test_times_give_minimum_median_and_maximum_of_both_clocks() -> None:
    samples = (Sample(1.0, 5.0), Sample(4.0, 6.0), Sample(2.0, 9.0))
    found = Times(samples, "cpu").as_dict()
    assert found["cpu_s"] == {"min": 1.0, "median": 2.0, "max": 4.0, "rounds": [1.0, 4.0, 2.0]}
    assert found["wall_s"]["median"] == Times(samples, "wall").median_s == 6.0


def test_a_ratio_is_the_median_over_rounds_measured_side_by_side() -> None:
    assert speedup([10.0, 40.0, 12.0], [5.0, 10.0, 4.0]) == pytest.approx(3.0)
