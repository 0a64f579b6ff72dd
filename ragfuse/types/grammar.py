"""The grammar that an answer must follow. A plain value; `hf/grammar.py` compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragfuse.errors import InputError


@dataclass(frozen=True)
class Grammar:
    """A grammar that an answer must follow, token by token. Make one with `json`, `regex`, `choice`
    or `lark`.

    Args:
        kind: How `source` is read.
        source: A JSON schema as JSON text, a regular expression, or the rules of a Lark grammar.
    """

    kind: Literal["json", "regex", "lark"]
    source: str

    @staticmethod
    def json(schema: Mapping[str, Any] | None = None) -> Grammar:
        """Return the grammar of JSON that a schema allows, formatted as `json.dumps` formats it.

        Args:
            schema: A JSON schema; None: any object. Objects whose schema names their properties may
                hold no others, unless it sets `additionalProperties`.
        """
        return Grammar("json", json_text({"type": "object"} if schema is None else schema))

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Return the grammar of texts that a regular expression matches as a whole."""
        return Grammar("regex", pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> Grammar:
        """Return the grammar of exactly one of these texts; raise InputError where there is none,
        or an empty one.
        """
        if isinstance(texts, str) or not texts or not all(texts):
            raise InputError(
                f"Grammar.choice takes a list of texts, none of them empty; found {texts!r}."
            )
        return Grammar("lark", "start: " + " | ".join(json.dumps(text) for text in texts))

    @staticmethod
    def lark(rules: str) -> Grammar:
        """Return the grammar with these Lark rules, in llguidance's dialect; the first rule applied
        is `start`.
        """
        return Grammar("lark", rules)


def json_text(schema: Mapping[str, Any], what: str = "The schema of a grammar") -> str:
    """Return a schema as JSON text; raise InputError where it is not an object or has no JSON form.

    Args:
        schema: A JSON schema.
        what: How an error message names it.
    """
    if not isinstance(schema, Mapping):
        raise InputError(
            f"{what} is {schema!r}; wanted a JSON schema: a dict such as {{'type': 'object'}}."
        )
    try:
        return json.dumps(closed(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # the last where it holds itself
        raise InputError(
            f"{what} cannot be written as JSON ({error}). Use plain dicts, lists and strings."
        ) from error


def closed(schema: Mapping[str, Any]) -> Any:
    """Return the schema with `additionalProperties: false` in objects that name their properties
    and do not set it.

    The result allows nothing that the schema forbids. A schema with `allOf` stays as it is, and so
    do objects with `anyOf`, `oneOf` or `$ref`: there one part may name properties that another part
    leaves out.
    """
    return schema if "allOf" in str(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping) or (
        "properties" in schema and not _ELSEWHERE.isdisjoint(schema)
    ):
        return schema
    inner = dict(schema)
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, Mapping):
            inner[name] = {key: _closed(each) for key, each in value.items()}
        elif name not in PLAIN_VALUES:
            inner[name] = _closed(value)
    if isinstance(schema.get("properties"), Mapping):
        inner.setdefault("additionalProperties", False)
    return inner


NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_ELSEWHERE = frozenset({"anyOf", "oneOf", "$ref"})
PLAIN_VALUES = ("enum", "const", "default", "examples", "required")
"""Keywords whose values are plain values or names, not schemas."""
