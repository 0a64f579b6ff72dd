"""`ragfuse sessions`: conversations looked after without a model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ragfuse import Engine
from ragfuse.cli.main import app
from tests.sessions.kit import QUESTIONS, talk


@pytest.fixture
def store(tiny_settings):
    """The folder of a store with two sessions."""
    with Engine(tiny_settings) as engine:
        talk(engine, QUESTIONS[:2], session="one")
        talk(engine, QUESTIONS[:1], session="two")
    return tiny_settings.store


def run(*arguments):
    return CliRunner().invoke(app, ["sessions", *map(str, arguments)])


def listed(store):
    done = run("ls", "--store", store, "--json", "-")
    return [each["id"] for each in json.loads(done.stdout)["sessions"]]


def test_sessions_are_listed_shown_exported_shortened_and_deleted(store, tmp_path):
    assert listed(store) == ["two", "one"]
    assert QUESTIONS[1] in run("show", "one", "--store", store).output
    assert run("show", "one", "--json", tmp_path / "one.json", "--store", store).exit_code == 0
    told = json.loads((tmp_path / "one.json").read_text())
    assert [message["role"] for message in told["messages"]] == ["user", "assistant"] * 2
    shorter = run("truncate", "one", "--tokens", 40, "--store", store, "--json", "-")
    assert json.loads(shorter.stdout)["dropped"] == json.loads(shorter.stdout)["tokens"] - 40
    done = json.loads(run("rm", "one", "--yes", "--store", store, "--json", "-").stdout)
    assert done["sessions"] == 1
    assert done["nbytes"] > 0
    assert listed(store) == ["two"]


def test_nothing_is_deleted_unless_somebody_says_so(store):
    run("rm", "one", "--store", store)
    assert listed(store) == ["two", "one"]
