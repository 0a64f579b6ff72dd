"""The part of a JSON schema that decoding can hold. What is left out of it is logged."""

from __future__ import annotations

import json
import logging
import re
from functools import lru_cache
from types import MappingProxyType
from typing import Any

log = logging.getLogger("ragfuse")

GUIDANCE = MappingProxyType(
    {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "coerce_one_of": True,
        "lenient": True,
    }
)
"""llguidance's options: the layout of `json.dumps`, as with free white space a small model may
write nothing else, and keywords that it does not know are left out.
"""


LARGEST = 10**15
SMALLEST = 1e-6
"""Bounds of numbers whose schema has none: a model may write digits without end."""
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
PLAIN_VALUES = ("enum", "const", "default", "examples", "required")
"""Keywords whose values are plain values or names, not schemas."""
ELSEWHERE = frozenset({"anyOf", "oneOf", "$ref"})
"""Keywords beside which an object may have properties that its own list leaves out."""
NUMBER_BOUNDS = ("minimum", "maximum", "multipleOf")
_DAY = (
    r"([12]\d{3}-((0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    r"|[12]\d([02468][048]|[13579][26])-02-29)"
)
_CLOCK = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?"
_ZONE = r"(Z|[+-](0\d|1[0-4]):[0-5]\d)"
FORMATS = MappingProxyType(
    {
        "date": f"^{_DAY}$",
        "time": f"^{_CLOCK}{_ZONE}?$",
        "date-time": f"^{_DAY}T{_CLOCK}{_ZONE}?$",
        "duration": r"^P\d{1,6}DT\d{1,2}H\d{1,2}M\d{1,2}(\.\d{1,6})?S$",
    }
)
"""Formats whose grammar in llguidance has digits without end, or days and years that no parser
reads.
"""


@lru_cache(maxsize=256)
def held_schema(source: str) -> str:
    """Return the schema that decoding can hold, with llguidance's options in it; log what was left
    out of it.

    Objects that name their properties hold no others unless they set `additionalProperties`, or
    another part of the schema may name more (`allOf` anywhere, `anyOf`, `oneOf` or `$ref` around
    them).

    Args:
        source: A JSON schema as JSON text.
    """
    from llguidance import LLMatcher

    left_out = list[str]()
    held = _held(json.loads(source), "", left_out, '"allOf"' not in source)
    text = json.dumps({**held, "x-guidance": dict(GUIDANCE)})
    is_wrong, notes = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(text)
    )
    if left_out := [*left_out, *(() if is_wrong else notes)]:
        log.warning("Not held while an answer is written, so check it: %s.", "; ".join(left_out))
    return text


def _held(schema: Any, path: str, left_out: list[str], closes: bool) -> Any:
    """Return a schema whose numbers end and, where it `closes`, whose objects have no further
    properties, without the patterns that Python reads and llguidance does not.
    """
    if isinstance(schema, list):
        return [_held(each, path, left_out, closes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closes = closes and ("properties" not in schema or ELSEWHERE.isdisjoint(schema))
    made = dict[str, Any]()
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            made[name] = {
                key: _held(each, f"{path}.{key}".lstrip("."), left_out, closes)
                for key, each in value.items()
            }
        elif name in ("anyOf", "oneOf") and isinstance(value, list):
            made[name] = _alternatives(value, path, left_out, closes)
        elif name == "pattern" and isinstance(value, str) and not _is_held(value):
            left_out.append(f"{path or 'the schema'}: pattern {json.dumps(value)}")
        elif name == "format" and value in FORMATS and "pattern" not in schema:
            made["pattern"] = FORMATS[value]
        else:
            made[name] = value if name in PLAIN_VALUES else _held(value, path, left_out, closes)
    if closes and isinstance(made.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return _bounded(made)


def _alternatives(given: list[Any], path: str, left_out: list[str], closes: bool) -> list[Any]:
    """Return what is held of each, without those that are not held whole where another one is that
    is not null.

    A number, then any text, is how pydantic writes a Decimal: of the text is known too little to
        hold it.
    """
    found = list[tuple[Any, list[str]]]()
    for before, each in zip([None, *given], given, strict=False):
        lost = list[str]()
        if (
            each == {"type": "string"}
            and isinstance(before, dict)
            and before.get("type") == "number"
        ):
            lost.append(f"{path or 'the schema'}: a text in place of the number")
        found.append((_held(each, path, lost, closes), lost))
    whole = [each for each, lost in found if not lost]
    if any(each != {"type": "null"} for each in whole):
        return whole
    left_out.extend(note for _, lost in found for note in lost)
    return [each for each, _ in found]


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose numbers have an end, where that leaves any."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if {"number", "integer"}.isdisjoint(kinds) or "enum" in schema or "const" in schema:
        return schema
    step = SMALLEST if "number" in kinds else 1
    bounded = {"minimum": -LARGEST, "maximum": LARGEST, "multipleOf": step, **schema}
    if "exclusiveMinimum" in bounded:
        bounded["minimum"] = round(bounded.pop("exclusiveMinimum") + step, 6)
    if "exclusiveMaximum" in bounded:
        bounded["maximum"] = round(bounded.pop("exclusiveMaximum") - step, 6)
    is_held = _compiles({name: bounded[name] for name in bounded.keys() & {"type", *NUMBER_BOUNDS}})
    return bounded if is_held else schema


def _is_held(pattern: str) -> bool:
    """Whether llguidance holds a pattern, or must say what is wrong with it."""
    try:
        re.compile(pattern)
    except re.error:
        return True
    return _compiles({"type": "string", "pattern": pattern})


def _compiles(schema: dict[str, Any]) -> bool:
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
