"""Two clocks, and one restart with tuned memory."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from ragfuse.calibration import runner
from ragfuse.calibration.runner import MALLOC, Stopwatch
from tests.kits.tiny import ROOT

TUNE = """
import os, sys, time
from rich.console import Console
from ragfuse.calibration.runner import malloc_setting, tune_malloc
tune_malloc(Console())
print("ran", os.getpid(), malloc_setting()["tuned"], sys.argv[1:], flush=True)
time.sleep(float(sys.argv[1]))
"""


def tuned(*arguments: str, **extra: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name not in MALLOC}
    env = {**env, **extra, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TUNE, *arguments]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_a_cpu_is_judged_by_cpu_time_and_a_gpu_by_the_wall():
    assert Stopwatch(torch.device("cpu")).clock == "cpu"
    assert Stopwatch(torch.device("cuda")).clock == "wall"


@pytest.mark.slow
@pytest.mark.skipif(not runner.is_glibc(), reason="only glibc's allocator reads these settings")
def test_the_process_starts_again_once_and_ctrl_c_reaches_it():
    process = tuned("100", "--an", "option")
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while lines[-1] and not lines[-1].startswith("ran"):
        lines.append(process.stdout.readline())
    assert "".join(lines).count("Restarting with") == 1
    assert lines[-1] == f"ran {process.pid} True ['100', '--an', 'option']\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    out, _ = tuned("0", MALLOC_TOP_PAD_="1").communicate(timeout=120)
    assert "Restarting with" not in out
    assert "False ['0']" in out


def test_what_is_said_of_the_machine_is_plain_json():
    around = runner.circumstances(torch.device("cpu"), 1)
    assert json.loads(json.dumps(around)) == around
    assert around["versions"]["torch"] == torch.__version__
