"""Finds JSON schemas that only endless JSON would meet, as one whose objects all require another of their kind.

A parser of grammars does not notice: it follows the references without end, and stops at one of its limits. What is no
matter of references is not looked at here: it is taken to be met.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MOST_PARTS = 50_000
"""The most parts of a schema that are looked at, some repeatedly; a schema that needs more is taken to be met."""
ROOT = "#"


def endless_reference(source: str) -> str | None:
    """Return the first reference of a schema that makes all of its JSON endless; None where some JSON of it ends.

    Args:
        source: The schema as JSON text.
    """
    if '"$ref"' not in source:
        return None
    try:
        schema = json.loads(source)
        return _References(schema).endless()
    except (ValueError, RecursionError, _TooManyPartsError):  # where it is no schema, the compiler tells
        return None


class _TooManyPartsError(Exception):
    """The schema needs more steps than `MOST_PARTS`."""


class _References:
    """The references in one schema, and which of them some finite JSON meets, as far as that is known."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._targets: dict[str, Any] = {}
        self._finite: set[str] = set()
        self._n_seen = 0

    def endless(self) -> str | None:
        """Return a reference that makes the whole schema endless; None for a schema that can be met."""
        found = self._collect(self._schema)
        names = list(found)
        while not self._ends(self._schema):
            n = len(self._finite)
            names.reverse()  # chains of references are as long in either direction
            for name in names:
                if name not in self._finite and self._ends(self._targets[name]):
                    self._finite.add(name)
            if len(self._finite) == n:
                return next((name for name in found if name not in self._finite), None)
        return None

    def _collect(self, schema: Any) -> dict[str, None]:
        """Return all references, in the order in which they are met, and keep what each refers to."""
        found: dict[str, None] = {}
        waiting = [schema]
        while waiting:
            at = waiting.pop()
            self._count()
            if isinstance(at, list):
                waiting.extend(reversed(at))
            elif isinstance(at, Mapping):
                name = at.get("$ref")
                if isinstance(name, str) and name not in found:
                    found[name] = None
                    self._targets[name] = self._at(name)
                waiting.extend(reversed(list(at.values())))
        return found

    def _at(self, name: str) -> Any:
        """Return what a reference of this document refers to; True, which all JSON meets, for any other."""
        if not name.startswith(ROOT):
            return True
        at = self._schema
        for step in unquote(name[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, Mapping) and step in at:
                at = at[step]
            elif isinstance(at, list) and step.isdecimal() and int(step) < len(at):
                at = at[int(step)]
            else:
                return True
        return at

    def _count(self) -> None:
        self._n_seen += 1
        if self._n_seen > MOST_PARTS:
            raise _TooManyPartsError

    def _ends(self, schema: Any) -> bool:
        """Return whether finite JSON meets a schema, where only the references known so far lead to any."""
        self._count()
        if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
            return True
        name = schema.get("$ref")
        if isinstance(name, str) and name not in self._finite:
            return False
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key] and not any(map(self._ends, schema[key])):
                return False
        if isinstance(schema.get("allOf"), list) and not all(map(self._ends, schema["allOf"])):
            return False
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds:
            return True
        return any(self._has_end(kind, schema) for kind in kinds)

    def _has_end(self, kind: Any, schema: Mapping[str, Any]) -> bool:
        """Return whether finite JSON of one type meets a schema."""
        if kind == "object":
            named, required = schema.get("properties"), schema.get("required")
            if not isinstance(named, Mapping) or not isinstance(required, list):
                return True
            return all(self._ends(named[each]) for each in required if isinstance(each, str) and each in named)
        least = schema.get("minItems")
        if kind == "array" and isinstance(least, int | float) and least > 0:
            first = schema.get("prefixItems")
            first = first if isinstance(first, list) else []
            items = [*first[: int(least)], *([schema.get("items")] if len(first) < least else [])]
            return all(map(self._ends, items))
        return True
