"""The part of a JSON schema that decoding can hold, and what of it can only be checked once an answer is written."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ragfuse.types.grammar import NAMED_SCHEMAS, PLAIN_VALUES

GUIDANCE = MappingProxyType(
    {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "coerce_one_of": True,
        "lenient": True,
    }
)
"""llguidance's options: the layout of `json.dumps`, as with free white space a small model may write nothing else, and
keywords that it does not know are left out."""


@lru_cache(maxsize=256)
def held_schema(source: str) -> tuple[str, tuple[str, ...]]:
    """Return the schema that decoding can hold, with llguidance's options in it, and what was left out of it.

    Args:
        source: A JSON schema as JSON text.
    """
    from llguidance import LLMatcher

    left_out = list[str]()
    text = json.dumps({**_held(json.loads(source), "", left_out), "x-guidance": dict(GUIDANCE)})
    is_wrong, notes = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(text))
    return text, (*left_out, *(() if is_wrong else notes))


def broken(source: str, text: str) -> tuple[str, ...]:
    """Return the fields of a JSON text that break its schema; none for a text that was cut off."""
    from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped]

    try:
        value = json.loads(text)
        errors = list(Draft202012Validator(json.loads(source), format_checker=FormatChecker()).iter_errors(value))
    except (ValueError, re.error):  # cut off, or a pattern that Python does not read
        return ()
    return tuple(f"broken by the answer: {error.json_path} {error.validator}" for error in errors)


def _held(schema: Any, path: str, left_out: list[str]) -> Any:
    """Return a schema without the patterns that Python reads and llguidance does not, such as look-ahead."""
    if isinstance(schema, list):
        return [_held(each, path, left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict[str, Any]()
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            made[name] = {key: _held(each, f"{path}.{key}".lstrip("."), left_out) for key, each in value.items()}
        elif name == "pattern" and isinstance(value, str) and not _is_held(value):
            left_out.append(f"{path or 'the schema'}: pattern {json.dumps(value)}")
        else:
            made[name] = value if name in PLAIN_VALUES else _held(value, path, left_out)
    return made


def _is_held(pattern: str) -> bool:
    """Whether llguidance holds a pattern, or must say what is wrong with it."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "pattern": pattern})
    if not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)):
        return True
    try:
        re.compile(pattern)
    except re.error:
        return True
    return False
