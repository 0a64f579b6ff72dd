"""Results where `--json` points."""

import json
from pathlib import Path

import pytest

from ragfuse import InputError
from ragfuse.cli.options import write_json


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    write_json({"speedup": 4.5}, target)
    with pytest.raises(TypeError):
        write_json({"speedup": object()}, target)
    assert json.loads(target.read_text()) == {"speedup": 4.5}
    assert list(tmp_path.iterdir()) == [target]


def test_a_result_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        write_json({}, tmp_path / "nowhere" / "result.json")


def test_a_result_goes_to_standard_output_or_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": "ä"}, None)
    assert capsys.readouterr().out == ""
    write_json({"a": "ä"}, Path("-"))
    assert json.loads(capsys.readouterr().out) == {"a": "ä"}
