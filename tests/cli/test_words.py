"""What people type for a command that has another name."""

import pytest
from typer.testing import CliRunner

from ragfuse.cli.main import app


@pytest.mark.parametrize(
    ("group", "typed", "meant"),
    [
        ("store", "rm", "clear"),
        ("store", "delete", "clear"),
        ("store", "remove", "clear"),
        ("store", "list", "ls"),
        ("sessions", "delete", "rm"),
        ("sessions", "clear", "rm"),
        ("models", "list", "ls"),
    ],
)
def test_a_word_that_is_no_command_here_leads_to_the_one_that_is_meant(group, typed, meant):
    result = CliRunner().invoke(app, [group, typed])
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert f"There is no command '{typed}' here: `" in said
    assert f"{group} {meant}` does that." in said


def test_other_words_are_refused_as_before():
    assert "No such command 'dance'" in CliRunner().invoke(app, ["store", "dance"]).stderr
    assert "There is no command" not in CliRunner().invoke(app, ["sessions", "rm"]).stderr
