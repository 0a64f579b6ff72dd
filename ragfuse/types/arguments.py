"""Errors for arguments that a constructor rejects, with suggestions for misspelt names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from pydantic import ValidationError

from ragfuse.errors import SettingsError

__all__ = ["checks_arguments"]

T = TypeVar("T", bound=type)
UNKNOWN_NAME = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's error types for an unknown argument."""


def checks_arguments(cls: T) -> T:
    """Decorate a class so that its constructor raises SettingsError for an unknown argument or a
    wrong value.

    Subclasses inherit the check. If the class has no pydantic fields, a missing argument and a
    superfluous positional argument still raise Python's TypeError.

    Args:
        cls: A class with fields that pydantic checks, or a class whose `__init__` names all
            parameters.
    """
    init = cls.__init__  # type: ignore[misc]
    parameters = list(inspect.signature(init).parameters.values())[1:]
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    names = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_POSITIONAL]

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        strange = [] if takes_any else [name for name in given if name not in names]
        if strange:
            raise unknown_argument(type(self).__name__, strange[0], names)
        try:
            init(self, *args, **given)
        except ValidationError as error:
            # the class has no fields, or pydantic's error is about another object
            if not hasattr(cls, "__pydantic_fields__") or error.title != type(self).__name__:
                raise
            raise refused_arguments(error, type(self)) from None

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def unknown_argument(owner: str, name: str, known: Sequence[str]) -> SettingsError:
    """Return the error for an unknown argument. The error suggests the closest known name."""
    return SettingsError(f"{owner} has no argument '{name:.80}'. {meant(name, known)}", name)


def meant(name: str, known: Sequence[str], all_known: str = "Valid names are") -> str:
    """Return a sentence that suggests the closest known name, or that lists all known names."""
    near = get_close_matches(name.lower(), known, 1)
    return f"Did you mean {near[0]}?" if near else f"{all_known}: {', '.join(known)}."


def refused_arguments(
    error: ValidationError, cls: Any, place: Callable[[str], str] = lambda name: ""
) -> SettingsError:
    """Return a SettingsError for the first unknown name or, if none is unknown, for a wrong value.

    `place` names the variable or file that set a field, or returns "" if the caller set the field.
    """
    errors = error.errors(include_url=False)
    known = {
        each: field
        for name, field in cls.__pydantic_fields__.items()
        for each in (name, field.alias)
        if each
    }
    strange = (each for each in errors if each["type"] in UNKNOWN_NAME and len(each["loc"]) == 1)
    first = next(strange, errors[0])
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] in UNKNOWN_NAME and name not in known:
        return unknown_argument(place(name) or cls.__name__, name, list(known))
    field = known.get(name)
    alike = (each["msg"] for each in errors if each["loc"][:1] == first["loc"][:1])
    told = " or ".join(dict.fromkeys(each.removeprefix("Value error, ") for each in alike))
    told = told.replace("Input should be", "wanted").partition(", unable to parse")[0]
    is_secret = field is None or not field.repr or first["type"] == "missing"
    found = "" if is_secret or "found" in told else f"; found {first['input']!r:.80}"
    where = place(name)
    return SettingsError(
        f"{name}: {told}{found}{f' ({where})' if where and where not in told else ''}.", name
    )
