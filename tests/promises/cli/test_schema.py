"""`ragfuse schema` and `ragfuse ask --pml`: schemas registered, listed, shown, asked over and
removed.
"""

from __future__ import annotations

import pytest

from ragfuse import Engine
from tests.promises.engine.test_schema_service import PROMPT, TRIP


@pytest.fixture
def given(environment, tiny_settings, tmp_path):
    """A folder with a schema and a prompt, over the tiny model and an empty store."""
    environment["RAGFUSE_STORE"] = str(tiny_settings.store)
    environment["RAGFUSE_MAX_TOKENS"] = "20"
    (tmp_path / "trip.xml").write_text(TRIP, "utf-8")
    (tmp_path / "ask.xml").write_text(PROMPT, "utf-8")
    return tmp_path


def test_a_schema_is_added_once_listed_and_removed(given, run, told):
    first, again = (
        told("schema", "add", given / "trip.xml"),
        told("schema", "add", given / "trip.xml"),
    )
    assert first["encoded"] == first["runs"] > 3
    assert first["nbytes"] > 0
    assert (again["encoded"], again["positions"]) == (0, first["positions"])
    assert [each["name"] for each in told("schema", "ls")["schemas"]] == ["trip"]
    assert "trip.xml" in run("schema", "ls").output
    assert told("schema", "rm", "trip")["nbytes"] > 0
    assert told("schema", "ls")["schemas"] == []
    assert "schema add FILE" in run("schema", "ls").output


def test_a_schema_is_shown_with_positions_tokens_and_bytes(given, run, told):
    run("schema", "add", given / "trip.xml")
    shown = told("schema", "show", "trip")
    places = {row["module"]: row for row in shown["modules"]}
    assert places["plan/abroad/oslo"]["start"] == places["plan/abroad/lisbon"]["start"]
    assert places["diet"]["nbytes"] == places["diet"]["tokens"] * shown["nbytes_per_token"]
    screen = run("schema", "show", given / "trip.xml").output
    assert all(name in screen for name in ("oslo", "lisbon", "days"))
    oslo = places["plan/abroad/oslo"]
    assert f"{oslo['start']:,}-{oslo['stop'] - 1:,}" in screen  # the first and the last position


def test_a_prompt_in_a_file_is_asked_over_its_modules(given, run, told, tiny_settings):
    run("schema", "add", given / "trip.xml")
    shown = told("ask", "--pml", given / "ask.xml")
    assert shown["trace"]["modules"] == [".", "plan", "plan/abroad", "plan/abroad/oslo"]
    with Engine(tiny_settings) as engine:
        from ragfuse.schemas.pml import read_prompt

        request = read_prompt(given / "ask.xml")
        assert shown["answer"].startswith(engine.answer(request).text)  # which is given less room
        more = engine.answer(request.asking("And what do I eat?")).trace.tokens
    assert told("ask", "And what do I eat?", "--pml", given / "ask.xml")["trace"]["tokens"] == more
    assert shown["trace"]["tokens_recomputed"] == 0
    blended = told("ask", "--pml", given / "ask.xml", "--blend", "--ratio", "0.3")
    assert blended["trace"]["tokens_recomputed"] > 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("ask", "--pml", "ask.xml"), "not registered"),
        (("ask", "--pml", "ask.xml", "--session", "mine"), "Remove --docs"),
        (("schema", "show", "none"), "neither a schema nor a file"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(given, run, arguments, why):
    done = run(*arguments)
    assert done.exit_code == 1
    assert why in " ".join(done.output.split())
    assert "Traceback" not in done.output
