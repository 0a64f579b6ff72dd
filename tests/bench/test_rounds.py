"""Fair rounds and two clocks."""

import pytest
import torch
from ragfuse_bench.rounds import Runner, speedup
from rich.console import Console


def test_cases_take_turns_after_one_warm_up_each() -> None:
    seen: list[str] = []
    runner = Runner(3, torch.device("cpu"), Console(quiet=True))
    times = runner.measure({name: lambda name=name: seen.append(name) for name in "abc"})
    assert seen == list("abc" * 4)
    assert [len(times[name].samples) for name in "abc"] == [3, 3, 3]


def test_a_ratio_is_the_median_over_rounds_measured_side_by_side() -> None:
    assert speedup([10.0, 40.0, 12.0], [5.0, 10.0, 4.0]) == pytest.approx(3.0)
