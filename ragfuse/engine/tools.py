"""The tools of a question: checked once, where the question comes in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ragfuse.engine.ask import Ask
from ragfuse.errors import InputError, about
from ragfuse.hf.grammar import check
from ragfuse.types.grammar import Grammar, json_text

Tool = Mapping[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}.
"""

TOOLS_AUTO, TOOLS_NONE, TOOLS_REQUIRED = "auto", "none", "required"
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """The checked tools of one question.

    Args:
        offered: The tools that the prompt describes.
        choice: "auto", "none", "required" or a tool's name.
    """

    offered: tuple[Tool, ...] = ()
    choice: str = TOOLS_AUTO

    @cached_property
    def schemas(self) -> dict[str, str]:
        """The JSON schemas (as text) of the arguments of each tool that may be called, by the
        tool's name.
        """
        named = {tool["function"]["name"]: _schema(tool) for tool in self.offered}
        return {self.choice: named[self.choice]} if self.choice in named else named

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return bool(self.offered) and self.choice != TOOLS_AUTO


def tools_of(ask: Ask) -> Tools:
    """Check the tools and the grammar of a question, and return the tools.

    Raises:
        InputError: A tool, the choice or the grammar cannot be used; the message names it.
    """
    choice, grammar, names = ask.tool_choice, ask.grammar, [_name(tool) for tool in ask.tools]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise InputError(f"Two tools are called '{twice}'; give each a name of its own.", "tools")
    if choice not in (TOOLS_AUTO, TOOLS_NONE, *names) and not (choice == TOOLS_REQUIRED and names):
        raise InputError(
            f"tool_choice is '{choice}', the tools are {names}; wanted 'auto', 'none', 'required'"
            " (with tools), or the name of one of them.",
            "tool_choice",
        )
    found = Tools(() if choice == TOOLS_NONE else tuple(ask.tools), choice)
    if grammar is not None:
        if found.must_call:
            raise InputError(
                "A grammar and a tool that must be called were both asked for; leave one of them"
                " out.",
                "grammar",
            )
        with about("grammar"):
            check(grammar, "The schema" if grammar.kind == "json" else "The grammar")
    for tool in found.offered:
        with about("tools"):
            name = tool["function"]["name"]
            check(Grammar("json", _schema(tool)), f"The parameters of the tool '{name}'")
    return found


def _name(tool: Tool) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            "A tool must be {'type': 'function', 'function': {'name': ..., 'description': ...,"
            " 'parameters': {...}}}, and its name letters, digits, '_', '-' and '.'; found"
            f" {tool!r}.",
            "tools",
        )
    return name


def _schema(tool: Tool) -> str:
    """Return the JSON schema (as text) of a tool's arguments; raise InputError unless it describes
    an object.
    """
    function = tool["function"]
    what = f"parameters of the tool '{function['name']}'"
    given = function.get("parameters") or {}
    text = json_text(
        given if not isinstance(given, Mapping) else {"type": "object", "properties": {}, **given},
        what,
    )
    if json.loads(text)["type"] != "object":
        raise InputError(
            f"The {what} must be a JSON schema of type 'object'; found type {given['type']!r}."
        )
    return text
