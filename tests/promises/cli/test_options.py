"""Settings as the environment gives them, and results where `--json` points."""

import json
import logging
from pathlib import Path

import pytest

from ragfuse import SettingsError
from ragfuse.cli.options import settings_of, write_json


def test_a_result_is_written_whole_or_not_at_all(tmp_path, capsys):
    target = tmp_path / "result.json"
    write_json({"speedup": 4.5}, target)
    with pytest.raises(TypeError):
        write_json({"speedup": object()}, target)
    assert json.loads(target.read_text()) == {"speedup": 4.5}
    assert list(tmp_path.iterdir()) == [target]
    write_json({"a": "ä"}, None)
    write_json({"a": "ä"}, Path("-"))
    assert json.loads(capsys.readouterr().out) == {"a": "ä"}


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("tiers", '["redis://a", "s3://b"]', ("redis://a", "s3://b")),
        ("written", '{"redis": ["cg2", "int8"]}', {"redis": ("int8", "cg2")}),
        ("written", '{"disk": "int8"}', {"disk": ("int8",)}),
    ],
)  # fmt: skip
def test_a_variable_gives_its_setting(name, given, found, monkeypatch):
    variable = "levels" if name == "written" else name
    monkeypatch.setenv(f"RAGFUSE_{variable.upper()}", given)
    settings = settings_of()
    assert getattr(settings, name) == found
    assert hash(settings) == hash(settings.model_copy())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ratio", "2"),
        ("policy", "hkdv"),
        ("tiers", '["redis://:secret@a"'),
        ("levels", '{"redis": ["int7"]}'),
    ],
)
def test_an_invalid_variable_is_named_without_its_password(name, given, monkeypatch):
    monkeypatch.setenv(f"RAGFUSE_{name.upper()}", given)
    with pytest.raises(SettingsError) as error:
        settings_of()
    assert name in str(error.value)
    assert "RAGFUSE_" in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("topk = 3", "top_k"),
        ("[ragfuse]\ntop_k = 3", "'ragfuse'"),
        ("nonsense =", "ragfuse.toml"),
    ],
)
def test_an_error_in_ragfuse_toml_names_the_file(text, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ragfuse.toml").write_text(text)
    with pytest.raises(SettingsError) as error:
        settings_of()
    assert word in str(error.value)
    assert "ragfuse.toml" in str(error.value)


def test_an_unknown_variable_is_warned_about_once(monkeypatch, caplog):
    monkeypatch.setenv("RAGFUSE_DISK_BYTE", "7")
    with caplog.at_level(logging.WARNING, "ragfuse"):
        settings_of()
        settings_of()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "RAGFUSE_DISK_BYTES" in line
