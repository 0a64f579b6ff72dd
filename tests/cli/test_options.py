"""Settings as the environment gives them, and results where `--json` points."""

import json
import logging
from pathlib import Path

import pytest

from ragfuse import Settings, SettingsError
from ragfuse.cli.options import settings_of, write_json


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    write_json({"speedup": 4.5}, target)
    with pytest.raises(TypeError):
        write_json({"speedup": object()}, target)
    assert json.loads(target.read_text()) == {"speedup": 4.5}
    assert list(tmp_path.iterdir()) == [target]


def test_a_result_goes_to_standard_output_or_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": "ä"}, None)
    assert capsys.readouterr().out == ""
    write_json({"a": "ä"}, Path("-"))
    assert json.loads(capsys.readouterr().out) == {"a": "ä"}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ('["redis://a", "s3://b"]', ("redis://a", "s3://b")),
        (" redis://a ", ("redis://a",)),
        ("s3://b", ("s3://b",)),
        ("", ()),
        ("[]", ()),
    ],
)
def test_tiers_may_be_a_list_one_url_or_nothing(given, found, monkeypatch):
    monkeypatch.setenv("RAGFUSE_TIERS", given)
    assert settings_of().tiers == found


def test_a_policy_that_is_none_is_refused_wherever_it_comes_from(monkeypatch, tmp_path):
    told = "policy: No selection policy 'hkdv'. Did you mean hkvd"
    with pytest.raises(SettingsError, match=rf"{told}.*--policy"):
        settings_of(policy="hkdv")
    with pytest.raises(SettingsError, match=r"'hkdv'\. Did you mean hkvd"):
        Settings(policy="hkdv")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ragfuse.toml").write_text('policy = "hkdv"')
    with pytest.raises(SettingsError, match=rf"{told}.*ragfuse.toml"):
        settings_of()
    monkeypatch.setenv("RAGFUSE_POLICY", "hkdv")
    with pytest.raises(SettingsError, match=rf"{told}.*environment RAGFUSE_POLICY"):
        settings_of()
    monkeypatch.setenv("RAGFUSE_POLICY", "lego-16")
    assert settings_of().policy == "lego-16"


@pytest.mark.parametrize("given", ['{"a": 1}', '["redis://:secret@a"', "{"])
def test_tiers_that_cannot_be_read_are_told_with_their_form_and_no_password(given, monkeypatch):
    monkeypatch.setenv("RAGFUSE_TIERS", given)
    with pytest.raises(SettingsError) as told:
        settings_of()
    assert "RAGFUSE_TIERS='[\"redis://" in str(told.value)
    assert "secret" not in str(told.value)
    assert "toml" not in str(told.value)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", {}),
        ('{"redis": ["cg2", "int8"]}', {"redis": ("int8", "cg2")}),
        ('{"disk": "int8", "objects-2": "auto"}', {"disk": ("int8",), "objects-2": ("auto",)}),
    ],
)
def test_levels_are_lists_by_tier_what_loses_least_first(given, found, monkeypatch):
    monkeypatch.setenv("RAGFUSE_LEVELS", given)
    settings = settings_of()
    assert settings.written == found
    assert hash(settings) == hash(settings.model_copy())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('{"redis": ["int7"]}', "raw, int8, cg1, cg2, cg3, cg4, or auto alone, found ['int7']"),
        ('{"redis": ["auto", "raw"]}', "auto alone"),
        ('{"redis": []}', "wanted some of"),
        ('{"tape": ["raw"]}', "(gpu, memory, disk, redis, objects, redis-2 ...), found 'tape'"),
        ('["raw"]', "levels by tier"),
        ('{"redis": 7}', "found 7"),
        ('{"redis"', "levels by tier"),
    ],
)
def test_levels_that_are_none_are_told_with_those_there_are(given, told, monkeypatch):
    monkeypatch.setenv("RAGFUSE_LEVELS", given)
    with pytest.raises(SettingsError) as error:
        settings_of()
    assert told in str(error.value)
    assert "RAGFUSE_LEVELS" in str(error.value)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "ratio",
            "2",
            (
                "ratio: Input should be less than or equal to 1, found '2' (environment"
                " RAGFUSE_RATIO)."
            ),
        ),
        (
            "threads",
            "many",
            "as an integer, found 'many' (environment RAGFUSE_THREADS).",
        ),
        (
            "threads",
            "0",
            "greater than or equal to 1, found '0' (environment RAGFUSE_THREADS).",
        ),
        ("dtype", "int4", "'auto', 'float32', 'bfloat16' or 'float16', found 'int4'"),
        ("session_ttl_s", "soon", "valid number, unable to parse string as a number, found 'soon'"),
    ],
)
def test_a_value_that_is_none_is_told_with_what_is_wanted(name, given, said, monkeypatch):
    monkeypatch.setenv(f"RAGFUSE_{name.upper()}", given)
    with pytest.raises(SettingsError) as error:
        settings_of()
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('top_k = "many"', "unable to parse string as an integer, found 'many' (ragfuse.toml)."),
        ("topk = 3", "There is no setting 'topk' (ragfuse.toml). Did you mean top_k?"),
        ("[ragfuse]\ntop_k = 3", "ragfuse.toml has a table [ragfuse]; wanted settings alone"),
        ("xyzzy = 3", "The settings are: "),
    ],
)
def test_what_ragfuse_toml_has_wrong_is_told_with_the_file(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ragfuse.toml").write_text(text)
    with pytest.raises(SettingsError) as error:
        settings_of()
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["store", "home", "ratio", "tiers", "model"])
def test_an_empty_variable_is_none(name, monkeypatch):
    monkeypatch.delenv("RAGFUSE_HOME", raising=False)
    usual = settings_of()
    monkeypatch.setenv(f"RAGFUSE_{name.upper()}", "")
    assert getattr(settings_of(), name) == getattr(usual, name)


def test_a_variable_that_is_no_json_is_named(monkeypatch):
    monkeypatch.setenv("RAGFUSE_PRICES", "cheap")
    with pytest.raises(SettingsError, match="Wanted JSON in RAGFUSE_PRICES"):
        settings_of()


def test_a_variable_that_is_no_setting_is_told_once_with_the_nearest(monkeypatch, caplog):
    monkeypatch.setenv("RAGFUSE_DISK_BYTE", "7")
    with caplog.at_level(logging.WARNING, "ragfuse"):
        settings_of()
        settings_of()
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        line == "RAGFUSE_DISK_BYTE is ignored, there is no such setting; did you mean"
        " RAGFUSE_DISK_BYTES?"
    )
