"""Fields of request bodies in error messages: their names as a client sends them, and what stands near an unknown one.

The validator's places also name the alternatives of a type, such as `constrained-str`; a client never sees these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

Part = str | int
Error = Mapping[str, Any]
BODY = "body"
"""Where in a request the fields of its body are, as FastAPI's own errors name it."""
SIMILAR = 0.7
"""Least similarity of a known field that is suggested for an unknown one."""
WANTED = MappingProxyType(
    {
        "model_type": "an object",
        "model_attributes_type": "an object",
        "dict_type": "an object",
        "list_type": "a list",
        "string_type": "a valid string",
        "int_type": "an integer",
        "float_type": "a number",
        "bool_type": "true or false",
    }
)
"""What was wanted, by the validator's type of error: one of JSON's types."""
FIELDS_OF: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "prompt": ("pml", "messages", "prompt", "input", "text"),
        "messages": ("messages", "input"),
        "max_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens"),
        "min_new_tokens": ("min_tokens",),
        "session": ("session_id", "previous_response_id"),
        "documents": ("documents", "ragfuse.retrieved"),
        "grammar": (
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "text.format",
        ),
        "response_format": ("response_format", "text.format"),
        "reasoning_effort": ("reasoning_effort", "reasoning.effort"),
        "verbosity": ("verbosity", "text.verbosity"),
        "overflow": ("ragfuse.overflow", "truncation"),
        **{name: (f"ragfuse.{name}",) for name in ("policy", "ratio", "reuse", "deadline_s", "blend")},
    }
)
"""The fields of request bodies that may give an argument of an answer, by the argument's name; others have its name."""
_COUNTED = re.compile(r" after validation, not \d+$")


def told_errors(model: type[BaseModel], errors: Sequence[Error]) -> list[dict[str, Any]]:
    """Return a validator's errors with their places in the request, `body` first, the most telling one first.

    An unknown field that is close to a known one comes first; its `ctx` has the `nearest`. Of the alternatives of a
    field the one comes first that the value fits but for a part of it. Where it fits none, all are named.
    """
    told = [_told(model, error) for error in errors]
    near = next((error for error in told if (error.get("ctx") or {}).get("nearest")), None)
    if near is not None:
        return [near, *(error for error in told if error is not near)]
    first = told[0]
    if first["type"] not in WANTED:
        return told
    place = first["loc"]
    same = [error for error in told if error["loc"][: len(place)] == place]
    closer = next((error for error in same if error["type"] not in WANTED), None)
    if closer is not None:
        return [closer, *(error for error in told if error is not closer)]
    deepest = max(same, key=lambda error: len(error["loc"]))
    wanted = dict.fromkeys(WANTED[error["type"]] for error in same if error["loc"] == deepest["loc"])
    return [{**deepest, "msg": f"wanted {' or '.join(wanted)}"}, *(error for error in told if error is not deepest)]


def field_given(body: BaseModel, argument: str) -> str | None:
    """Return the field that gave an argument in a request, such as "max_completion_tokens"; None where none did.

    Args:
        body: The request's body.
        argument: The argument's name, as a program in Python has it.
    """
    return next((name for name in FIELDS_OF.get(argument, (argument,)) if _is_given(body, name)), None)


def _is_given(body: BaseModel, name: str) -> bool:
    """Return whether a body has a value in the field `name`, such as "ragfuse.ratio"."""
    value: Any = body
    for part in name.split("."):
        if not isinstance(value, BaseModel) or part not in value.model_fields_set:
            return False
        value = getattr(value, part)
    return value is not None


def name_of(place: Sequence[Part]) -> str:
    """Return the name of a field by its place in a request, such as `messages.0.role` for `body, messages, 0, role`.

    Args:
        place: Where in the request it was sent (`body`, `query` or `path`), then its place there. A field may itself be
            named `query`.
    """
    return ".".join(map(str, place[1:]))


def in_words(names: Sequence[str]) -> str:
    """Return the names of fields for a sentence, such as "'model' and 'messages'"."""
    quoted = [f"'{name:.80}'" for name in names]
    return " and ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


def _told(model: type[BaseModel], error: Error) -> dict[str, Any]:
    is_unknown = error["type"] == "extra_forbidden"
    place, known = _place(model, error["loc"], is_unknown)
    told = {**error, "loc": (BODY, *place), "msg": _COUNTED.sub("", str(error["msg"]))}
    if not is_unknown:
        return told
    nearest = get_close_matches(str(place[-1]), known, 1, SIMILAR)
    return {**told, "ctx": {"nearest": name_of((BODY, *place[:-1], nearest[0]))}} if nearest else told


def _place(model: type[BaseModel], parts: Sequence[Part], is_unknown: bool) -> tuple[tuple[Part, ...], list[str]]:
    """Return an error's place without names of alternatives, and the fields that are known there.

    `is_unknown`: whether the last part is a field that the body should not have.
    """
    place, types, known = list[Part](), list[Any]([model]), list[str]()
    for at, part in enumerate(parts):
        models = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
        known = [name for each in models for name in each.model_fields]
        if isinstance(part, int):
            types = [item for each in types if get_origin(each) is list for item in _alternatives(get_args(each)[0])]
        elif part in known:
            types = [
                found
                for each in models
                if part in each.model_fields
                for found in _alternatives(each.model_fields[part].annotation)
            ]
        elif len(types) == 1 and get_origin(types[0]) is dict:
            types = list(_alternatives(get_args(types[0])[1]))
        elif not is_unknown or at < len(parts) - 1:  # it names an alternative
            types = [each for each in models if each.__name__ == part] or types
            continue
        place.append(part)
    return tuple(place), known


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the types that a field may have, without None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from _alternatives(each)
    elif annotation is not NoneType:
        yield annotation
