"""`ragfuse sessions`: conversations looked after without a model."""

from __future__ import annotations

import pytest

from ragfuse import Engine
from tests.kits.sessions import QUESTIONS, talk


@pytest.fixture
def store(tiny_settings):
    """The folder of a store with two sessions."""
    with Engine(tiny_settings) as engine:
        talk(engine, QUESTIONS[:2], session="one")
        talk(engine, QUESTIONS[:1], session="two")
    return tiny_settings.store


@pytest.fixture
def run(run, store):
    """Runs a command of `ragfuse sessions`."""
    return lambda *arguments: run("sessions", *arguments, "--store", store)


def listed(told):
    return [each["id"] for each in told("ls")["sessions"]]


def test_sessions_are_listed_shown_exported_and_deleted(run, told):
    assert listed(told) == ["two", "one"]
    assert QUESTIONS[1] in run("show", "one").output
    roles = [message["role"] for message in told("show", "one")["messages"]]
    assert roles == ["user", "assistant"] * 2
    done = told("rm", "one", "--yes")
    assert done["sessions"] == 1
    assert done["nbytes"] > 0
    assert listed(told) == ["two"]


def test_nothing_is_deleted_unless_somebody_says_so(run, told):
    run("rm", "one")
    assert listed(told) == ["two", "one"]
