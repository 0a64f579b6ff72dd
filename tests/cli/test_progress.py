"""What is shown while something takes long: to who looks, and to nobody else."""

import os
import pty
import re
import subprocess

import pytest

from tests.cli.kit import COMMAND, variables


def on_a_terminal(environment, *arguments):
    """What a command writes on a terminal, from standard output and standard error."""
    ours, theirs = pty.openpty()
    kept = variables(environment, TERM="xterm", COLUMNS="100")
    command = [*COMMAND, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=kept)
    os.close(theirs)
    said = b""
    while True:
        try:
            said += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait() == 0, said
    return said.decode()


@pytest.mark.slow
def test_verify_says_on_a_terminal_what_it_is_at_and_takes_it_away(environment):
    said = on_a_terminal(environment, "verify")
    # of a tiny model's checks not each lasts until the next frame
    assert re.search(r"verifying: \w+", said)
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).rstrip().endswith("can be fused.")


@pytest.mark.parametrize("command", ["verify", "ingest", "ask", "doctor"])
def test_nothing_moves_where_there_is_no_terminal(command, run, book):
    arguments = {"ingest": [book], "ask": ["Who?", "--docs", book]}.get(command, [])
    result = run(command, *arguments)
    assert result.exit_code == 0, result.output
    for moving in ("\x1b", "\r", "loading the model", "verifying", "encoding ", "looking around"):
        assert moving not in result.stdout + result.stderr
