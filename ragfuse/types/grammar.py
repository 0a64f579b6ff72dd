"""What an answer must follow: a value, compiled elsewhere (`hf/grammar.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragfuse.errors import InputError


@dataclass(frozen=True)
class Grammar:
    """What an answer must follow, to the last character; made by `json`, `regex`, `choice` or `lark`.

    kind: how `source` is to be read; a schema is kept as its JSON text.
    """

    kind: Literal["json", "regex", "lark"]
    source: str

    @staticmethod
    def json(schema: Mapping[str, Any] | None = None) -> Grammar:
        """JSON that a schema allows (None: any object), written as `json.dumps` writes it.

        Objects whose schema names their properties hold no others, unless it says `additionalProperties`.
        """
        return Grammar("json", json_text({"type": "object"} if schema is None else schema))

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return Grammar("regex", pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> Grammar:
        """One of some texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InputError(f"Grammar.choice takes a list of texts that are not empty; found {texts!r}.")
        return Grammar("lark", "start: " + " | ".join(json.dumps(text) for text in texts))

    @staticmethod
    def lark(rules: str) -> Grammar:
        """Text by the rules of a Lark grammar, as llguidance reads them; it begins with `start`."""
        return Grammar("lark", rules)


def json_text(schema: Mapping[str, Any], what: str = "The schema of a grammar") -> str:
    """A schema as JSON; InputError if it is no object or cannot be written as JSON."""
    if not isinstance(schema, Mapping):
        raise InputError(f"{what} is {schema!r}; wanted a JSON schema: an object such as {{'type': 'object'}}.")
    try:
        return json.dumps(closed(schema))
    except (TypeError, ValueError, RecursionError) as error:  # the last where it holds itself
        raise InputError(f"{what} cannot be written as JSON ({error}); take plain objects, lists and texts.") from error


def closed(schema: Mapping[str, Any]) -> Any:
    """The same schema, but objects that name their properties allow no others unless it says so.

    Whatever it allows, the first one allows too. Nothing is changed with `allOf`, nor in an object that goes on in
    `anyOf`, `oneOf` or `$ref`: there one part may name what another leaves out.
    """
    return schema if "allOf" in str(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping) or ("properties" in schema and not _ELSEWHERE.isdisjoint(schema)):
        return schema
    inner = {name: _below(name, value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        inner.setdefault("additionalProperties", False)
    return inner


def _below(name: str, value: Any) -> Any:
    """What stands under a keyword: values, schemas by name, or schemas."""
    if name in _NAMED and isinstance(value, Mapping):
        return {key: _closed(each) for key, each in value.items()}
    return value if name in _VALUES else _closed(value)


_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_ELSEWHERE = frozenset({"anyOf", "oneOf", "$ref"})
_VALUES = ("enum", "const", "default", "examples", "required")
"""Keywords that hold values or names, no schemas."""
