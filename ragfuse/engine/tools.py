"""The tools of a question: checked once, where the question comes in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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


def tools_of(ask: Ask) -> tuple[Tool, ...]:
    """Check the tools and the grammar of a question, and return the tools that its prompt
    describes.

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
    offered = () if choice == TOOLS_NONE else tuple(ask.tools)
    if grammar is not None:
        if offered and choice != TOOLS_AUTO:
            raise InputError(
                "A grammar and a tool that must be called were both asked for; leave one of them"
                " out.",
                "grammar",
            )
        with about("grammar"):
            check(grammar, "The schema" if grammar.kind == "json" else "The grammar")
    with about("tools"):
        for name, schema in schemas_of(offered).items():
            check(Grammar("json", schema), f"The parameters of the tool '{name}'")
    return offered


def schemas_of(tools: Sequence[Tool]) -> dict[str, str]:
    """Return the JSON schemas (as text) of the arguments of tools, by the tools' names."""
    return {tool["function"]["name"]: _schema(tool) for tool in tools}


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
