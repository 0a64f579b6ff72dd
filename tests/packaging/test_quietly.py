"""A step of the set-up: what it says as it begins and ends, and its log. Real processes and a real
pip.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def test_a_step_that_works_says_that_it_begins_and_ends_and_the_rest_is_in_the_log(tmp_path):
    said = step(tmp_path / "log", sys.executable, "-c", "print('much'); print('more')")
    assert re.fullmatch(r"Trying \.\.\.\nTrying: done in \d+ s\n", said.stdout)
    assert (said.stderr, said.returncode) == ("", 0)
    assert "much\nmore" in (tmp_path / "log").read_text()
    step(tmp_path / "log", sys.executable, "-c", "print('later')")
    assert "much" in (tmp_path / "log").read_text()  # of all steps, in order


def test_a_step_that_fails_shows_the_end_of_its_log_and_names_it(tmp_path):
    code = "import sys\nfor n in range(100): print('line', n)\nsys.exit('no such index')"
    said = step(tmp_path / "log", sys.executable, "-c", code)
    assert said.returncode == 1
    assert said.stdout == "Trying ...\nTrying: failed\n"
    assert "no such index" in said.stderr
    assert "line 1\n" not in said.stderr
    assert said.stderr.endswith(f"Trying: exit status 1. All of it: {tmp_path / 'log'}\n")


@pytest.mark.parametrize("place", ["log", "new/folder/log"])
def test_ctrl_c_ends_the_step_and_what_it_runs(tmp_path, place):
    log = tmp_path / place
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
