"""Fair rounds, two clocks, one restart with tuned memory."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ragfuse.calibration import runner
from ragfuse.calibration.runner import MALLOC, Runner, Sample, Times, speedup, thread_count

ROOT = Path(__file__).resolve().parents[2]
TUNE = """
import os, sys
from rich.console import Console
from ragfuse.calibration.runner import malloc_setting, tune_malloc
tune_malloc(Console())
print("ran", os.getpid(), malloc_setting()["tuned"], sys.argv[1:], flush=True)
"""
glibc = pytest.mark.skipif(
    not runner.is_glibc(), reason="only glibc's allocator heeds these settings"
)


def quiet(rounds: int) -> Runner:
    return Runner(rounds, torch.device("cpu"), Console(file=io.StringIO()))


def tuned(code: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name not in MALLOC}
    env = {**env, **extra, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_cases_take_turns_after_one_warm_up_each() -> None:
    seen: list[str] = []
    times = quiet(3).measure({name: lambda name=name: seen.append(name) for name in "abc"})
    assert seen == list("abc" * 4)
    assert [len(times[name].samples) for name in "abc"] == [3, 3, 3]


def test_cpu_time_leaves_out_waiting_and_the_wall_does_not() -> None:
    sample = quiet(1).once(lambda: time.sleep(0.05))
    assert sample.wall_s >= 0.05
    assert sample.cpu_s < sample.wall_s


def test_a_cpu_is_judged_by_cpu_time_and_a_gpu_by_the_wall() -> None:
    assert quiet(1).clock == "cpu"
    assert Runner(1, torch.device("cuda"), Console()).clock == "wall"
    samples = (Sample(1.0, 10.0), Sample(3.0, 30.0), Sample(2.0, 20.0))
    assert Times(samples, "cpu").median_s == 2.0
    assert Times(samples, "wall").seconds == (10.0, 30.0, 20.0)


def test_times_give_minimum_median_and_maximum_of_both_clocks() -> None:
    found = Times((Sample(1.0, 5.0), Sample(4.0, 6.0), Sample(2.0, 9.0)), "cpu").as_dict()
    assert found["cpu_s"] == {"min": 1.0, "median": 2.0, "max": 4.0, "rounds": [1.0, 4.0, 2.0]}
    assert found["wall_s"]["median"] == 6.0


def test_a_ratio_is_the_median_over_rounds_measured_side_by_side() -> None:
    assert speedup([10.0, 40.0, 12.0], [5.0, 10.0, 4.0]) == 3.0


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    with thread_count(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.slow
@glibc
def test_the_process_starts_again_once_and_says_so() -> None:
    process = tuned(TUNE, "--an", "option")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.count("Starting again") == 1
    assert "MALLOC" not in out
    assert [line for line in out.splitlines() if line.startswith("ran")] == [
        f"ran {process.pid} True ['--an', 'option']"
    ]


@pytest.mark.slow
@glibc
def test_settings_of_the_users_own_are_left_alone() -> None:
    process = tuned(TUNE, MALLOC_TOP_PAD_="1")
    out, _ = process.communicate(timeout=120)
    assert "Starting again" not in out
    assert f"ran {process.pid} False []" in out


@pytest.mark.slow
@glibc
def test_the_exit_code_comes_through() -> None:
    process = tuned(TUNE + "sys.exit(7)")
    process.communicate(timeout=120)
    assert process.returncode == 7


@pytest.mark.slow
@glibc
def test_ctrl_c_reaches_what_was_started_again() -> None:
    process = tuned(TUNE + "import time; time.sleep(100)")
    assert process.stdout is not None
    while not process.stdout.readline().startswith("ran"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in out
    assert process.returncode in (130, -signal.SIGINT)


def test_what_is_said_of_the_machine_is_plain_json() -> None:
    around = runner.circumstances(torch.device("cpu"), 1)
    assert json.loads(json.dumps(around)) == around
    assert around["machine"]["cpu"]
    assert around["machine"]["memory_bytes"] > 0
    assert around["versions"]["torch"] == torch.__version__
    assert set(around) == {"machine", "versions", "malloc", "threads", "date"}
