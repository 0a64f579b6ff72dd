"""`ragfuse bench modules` on the command line."""

from __future__ import annotations

from typer.testing import CliRunner

from ragfuse.cli.main import app


def test_a_result_that_can_be_written_nowhere_is_told_before_anything_is_measured(tmp_path):
    done = CliRunner().invoke(app, ["bench", "modules", "--json", str(tmp_path / "none" / "x.json")])
    assert done.exit_code == 1
    assert "x.json" in "".join(done.output.split())
