"""What is shown while something takes long is shown on a terminal alone."""

import pytest


@pytest.mark.parametrize("command", ["verify", "ingest", "ask", "doctor"])
def test_nothing_moves_where_there_is_no_terminal(command, run, book):
    arguments = {"ingest": [book], "ask": ["Who?", "--docs", book]}.get(command, [])
    result = run(command, *arguments)
    assert result.exit_code == 0, result.output
    for moving in ("\x1b", "\r", "loading the model", "verifying", "encoding ", "checking this "):
        assert moving not in result.stdout + result.stderr
