"""The rows of a data set in JSON or JSONL: what each says by name, and errors that name its
line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragfuse.errors import InputError

PASSAGES = "a list of {title, text} or of texts"
KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "a truth value",
    type(None): "null",
}


@dataclass(frozen=True)
class Row:
    """One row, and where it stands.

    where: as errors name it, with its file.
    """

    where: str
    said: Mapping[str, Any]

    def wrong(self, name: str, wanted: str, found: str) -> InputError:
        """Return the error for a value that is something else."""
        return InputError(
            f"{self.where}: {name} must be {wanted}, found {found}. Mend it or take the row out."
        )

    def text(self, name: str) -> str:
        """Return a text; InputError where there is none."""
        found = self.said.get(name)
        if not isinstance(found, str):
            raise self.wrong(name, "a text", self._kind(name))
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; InputError where it is something else."""
        found = self.said.get(name)
        if not isinstance(found, list):
            raise self.wrong(name, "a list of texts", self._kind(name))
        other = next((each for each in found if not isinstance(each, str)), None)
        if other is not None or None in found:
            raise self.wrong(name, "a list of texts", f"{kind_of(other)} in it")
        return tuple(found)

    def passages(self, name: str = "ctxs") -> list[str]:
        """Return passages, each under its title if it has one; InputError where they are something
        else.
        """
        found = self.said.get(name)
        if not isinstance(found, list):
            raise self.wrong(name, PASSAGES, self._kind(name))
        return [self._passage(name, each) for each in found]

    def _passage(self, name: str, given: Any) -> str:
        if isinstance(given, str):
            return given
        if not isinstance(given, dict):
            raise self.wrong(name, PASSAGES, f"{kind_of(given)} in it")
        title, text = given.get("title") or "", given.get("text")
        if not isinstance(text, str):
            raise self.wrong(
                name,
                PASSAGES,
                f"{kind_of(text)} as a text" if "text" in given else "one without a text",
            )
        if not isinstance(title, str):
            raise self.wrong(name, PASSAGES, f"{kind_of(title)} as a title")
        return f"{title}\n{text}".strip() if title else text

    def _kind(self, name: str) -> str:
        return kind_of(self.said[name]) if name in self.said else "none"


def kind_of(value: Any) -> str:
    """Return what a value of JSON is, in words."""
    return KINDS.get(type(value), "a number")


def parsed(text: str) -> tuple[Any, list[str]]:
    """Return what a file of JSON or JSONL says, and where each row stands.

    A file of one object or list is returned as it is; JSONL is a list of its lines.

    Raises:
        ValueError: It is neither.
    """
    try:
        data = json.loads(text)
    except ValueError as whole:
        rows, places = list[Any](), list[str]()
        # JSON may have other ends of lines in its texts
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                if not rows:
                    raise whole from None
                raise ValueError(
                    f"line {number} is no JSON ({error.msg} at column {error.colno})"
                ) from error
            places.append(f"line {number}")
        return rows, places
    count = len(data) if isinstance(data, list) else 1
    return data, (
        ["line 1"]
        if isinstance(data, dict)
        else [f"row {number}" for number in range(1, count + 1)]
    )


def rows_of(path: object, data: list[Any], places: list[str]) -> list[Row]:
    """Return rows with their places; InputError for one that is no object."""
    for place, said in zip(places, data, strict=True):
        if not isinstance(said, dict):
            raise InputError(
                f"'{path}', {place}: wanted an object with a question, found {kind_of(said)}."
            )
    return [Row(f"'{path}', {place}", said) for place, said in zip(places, data, strict=True)]
