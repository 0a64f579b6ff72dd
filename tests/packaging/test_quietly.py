"""A step of the set-up: what it says as it ends early, and its log. Real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = [sys.executable, str(ROOT / "deploy" / "quietly.py")]


def step(log, *command, of=0):
    asked = [
        *STEP,
        "Trying",
        str(log),
        *(["--of", str(of)] if of else []),
        "--",
        *map(str, command),
    ]
    return subprocess.run(asked, capture_output=True, text=True)


def test_a_step_that_fails_shows_the_end_of_its_log_and_names_it(tmp_path):
    code = "import sys\nfor n in range(100): print('line', n)\nsys.exit('no such index')"
    said = step(tmp_path / "log", sys.executable, "-c", code)
    assert said.returncode == 1
    assert said.stdout == "Trying ...\nTrying: failed\n"
    assert "no such index" in said.stderr
    assert "line 1\n" not in said.stderr
    assert said.stderr.endswith(f"Trying: exit status 1. All of it: {tmp_path / 'log'}\n")


def test_ctrl_c_ends_the_step_and_what_it_runs(tmp_path):
    log = tmp_path / "new" / "folder" / "log"
    code = "import time; print('begun', flush=True); time.sleep(60)"
    asked = [*STEP, "Trying", str(log), "--", sys.executable, "-c", code]
    run = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 120
    assert run.stdout.readline() == "Trying ...\n"  # before what it runs has ended
    while not (log.exists() and "begun\n" in log.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the step and to what it runs
    assert run.wait(120) == 130
    assert run.stdout.read() == "Trying: stopped\n"
