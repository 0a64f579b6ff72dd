"""Grammars that constrain answers, as plain values. `hf/grammar.py` compiles a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragfuse.errors import InputError


@dataclass(frozen=True)
class Grammar:
    """A grammar that constrains an answer token by token, created by `json`, `regex`, `choice` or
    `lark`.

    Args:
        kind: The language of `source`.
        source: A JSON schema as JSON text, a regular expression, or the rules of a Lark grammar.
    """

    kind: Literal["json", "regex", "lark"]
    source: str

    @staticmethod
    def json(schema: Mapping[str, Any] | None = None) -> Grammar:
        """Return the grammar of JSON that matches a schema and is formatted as by `json.dumps`.

        Args:
            schema: A JSON schema. None means any object. Properties outside an object schema's
                `properties` are allowed only if another part of the schema allows them, such as
                `additionalProperties`.
        """
        return Grammar("json", json_text({"type": "object"} if schema is None else schema))

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Return the grammar of texts that a regular expression fully matches."""
        return Grammar("regex", pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> Grammar:
        """Return a grammar that allows only `texts`. An empty text or list raises InputError."""
        if isinstance(texts, str) or not texts or not all(texts):
            raise InputError(f"Grammar.choice needs a list of non-empty texts, found {texts!r}.")
        return Grammar("lark", "start: " + " | ".join(json.dumps(text) for text in texts))

    @staticmethod
    def lark(rules: str) -> Grammar:
        """Return a grammar of Lark rules in llguidance's dialect. The start rule is `start`."""
        return Grammar("lark", rules)


def json_text(schema: Mapping[str, Any], what: str = "The schema of a grammar") -> str:
    """Return a JSON schema as JSON text. `what` is the name of the schema in error messages.

    Raises:
        InputError: The schema is not a mapping, or cannot be written as JSON.
    """
    if not isinstance(schema, Mapping):
        raise InputError(
            f"{what} must be a JSON schema, a dict such as {{'type': 'object'}}; found {schema!r}."
        )
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # a schema may contain itself
        raise InputError(
            f"{what} cannot be written as JSON ({error}). Use plain dicts, lists and strings."
        ) from error
