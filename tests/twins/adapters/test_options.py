"""The options of a call are read alike for all frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from ragfuse import Ask, Grammar, InputError, SettingsError
from ragfuse.adapters import CALL_OPTIONS, ask_of

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}}
    for name in ("paint", "knock")
]


class Door(BaseModel):
    """A door."""

    is_open: bool


def asked(fields: dict[str, Any] | None = None, /, **call: Any) -> Ask:
    return ask_of("Model", fields or {}, call)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": 7, "seed": 3, "stop": ["."]}, Ask(max_tokens=7, seed=3, stop=["."])),
        (
            {"policy": "hkvd", "ratio": 0.3},
            Ask(policy="hkvd", ratio=0.3),
        ),
        ({"reuse": False, "deadline_s": 2.0}, Ask(reuse=False, deadline_s=2.0)),
        ({"top_p": 0.5}, Ask()),
        (
            {"temperature": np.float32(0.5), "top_k": np.int64(3)},
            Ask(options={"do_sample": True, "temperature": 0.5, "top_k": 3}),
        ),
        (
            {"presence_penalty": 1.0, "timeout": 9.0},
            Ask(options={"presence_penalty": 1.0, "max_time": 9.0}),
        ),
        ({"generate_kwargs": {"min_p": 0.2}}, Ask(options={"min_p": 0.2})),
        ({"enable_thinking": False}, Ask(chat_template_kwargs={"enable_thinking": False})),
        ({"grammar": Grammar.regex("a")}, Ask(grammar=Grammar.regex("a"))),
        ({"response_format": {"type": "json_object"}}, Ask(grammar=Grammar.json())),
        ({"response_format": Door}, Ask(grammar=Grammar.json(Door.model_json_schema()))),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "object"}},
                }
            },
            Ask(grammar=Grammar.json({"type": "object"})),
        ),
    ],
    ids=str,
)
def test_an_option_means_the_same_as_a_field_and_in_a_call(given, expected):
    assert asked(given) == asked({}, **given) == expected


def test_a_call_goes_before_its_model():
    fields = {
        "ratio": 0.1,
        "stop": ["."],
        "chat_template_kwargs": {"mood": "good"},
        "of_the_framework": 1,
    }
    ask = asked(fields, ratio=0.5, stop=None, chat_template_kwargs={"date": "today"})
    assert (ask.ratio, tuple(ask.stop)) == (0.5, ())
    assert ask.chat_template_kwargs == {"mood": "good", "date": "today"}


def test_tools_and_documents_come_along():
    ask = ask_of(
        "Model",
        {},
        {"tool_choice": "any", "parallel_tool_calls": False},
        TOOLS,
        [("A letter.", "a.txt")],
    )
    assert (ask.tool_choice, ask.parallel_tool_calls) == ("required", False)
    assert ([*ask.tools], [*ask.documents]) == (TOOLS, [("A letter.", "a.txt")])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratios", 0.5),
        ("ratio", 3.0),
        ("top_p", 3),
        ("stop", [""]),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, value):
    """Also what changes nothing at temperature 0."""
    with pytest.raises(SettingsError, match=name):
        asked({}, **{name: value})
    if name in CALL_OPTIONS:
        with pytest.raises(SettingsError, match=name):
            asked({name: value})


@pytest.mark.parametrize("form", ["xml", {"type": "xml"}, {"type": "json_schema"}])
def test_a_form_that_cannot_be_followed_is_refused(form):
    with pytest.raises(InputError, match="response_format"):
        asked({}, response_format=form)
