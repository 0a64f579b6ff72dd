"""Bodies of requests: bytes become text once, strictly, and text becomes values once, on a thread kept for that.

What is checked is what is parsed: there is no second look at the bytes that might read them in another encoding. The
work on one body is bounded by its bytes and by `MOST_MARKS`, so that none holds up the requests behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from ragfuse.serve.guard import unless_gone
from ragfuse.serve.refusals import Refusal

DEEPEST = 64
"""Objects and lists within each other that a body may hold."""
MOST_MARKS = 32_768
"""Texts, objects and lists that a body may hold: each becomes an object of Python's, a hundred times its own size."""
MOST_COMMAS = 262_144
"""Values that a body may hold: token ids of a long prompt are this many at most."""
STEP = 65_536
"""Characters that are looked at before other threads may run."""
_OUTSIDE = re.compile(r"[\[\]{}\"]")
_IN_TEXT = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BOM = "\ufeff"


def decoded(raw: bytes | bytearray) -> str:
    """The text of a body in UTF-8; Refusal for bytes that are none, such as UTF-16, or half a character on its own.

    A byte order mark before it, which some programs write, is left out.
    """
    try:
        return raw.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        found = raw[error.start]
        raise Refusal(
            400,
            f"Wanted JSON in UTF-8, found the byte 0x{found:02x} at {error.start:,}, which is none there. Encode the "
            "body as UTF-8.",
            "encoding",
        ) from None


def check_shape(text: str) -> None:
    """Refusal for JSON whose objects and lists lie too deep in each other, or that holds too many values.

    Reading the first would overflow a stack; the second takes seconds in which nobody else is served. Every character
    is looked at once, `STEP` at a time; no text that JSON refuses is refused here.
    """
    depth = marks = commas = at = 0
    while at < len(text):
        found = _OUTSIDE.search(text, at, at + STEP)
        end = found.start() if found else at + STEP
        commas, sign, at = commas + text.count(",", at, end), text[end : end + 1] if found else "", end + bool(found)
        if sign == '"':
            marks, at = marks + 1, _end_of_text(text, at)
        elif sign in ("[", "{"):
            marks, depth = marks + 1, depth + 1
        elif sign:
            depth -= 1
        if depth > DEEPEST:
            raise Refusal(400, f"Wanted JSON of at most {DEEPEST} levels, found more. Make it flatter.", "too_deep")
        if marks > MOST_MARKS or commas > MOST_COMMAS:
            raise Refusal(
                400,
                f"Wanted at most {MOST_MARKS:,} texts, objects and lists in a body, and {MOST_COMMAS:,} values; found "
                "more. Send less at once.",
                "too_many",
            )


def _end_of_text(text: str, at: int) -> int:
    """Behind the quote that ends a text which began before `at`; the end of all where none does."""
    while at < len(text):
        found = _IN_TEXT.match(text, at, at + STEP)
        end = found.end() if found else at
        if end < len(text) and text[end] == '"':
            return end + 1
        at = end if end > at else at + 2  # an escape that the step's end parts
    return len(text)


def parsed(text: str) -> Any:
    """What a body says; Refusal where it is no JSON, or holds half of a character, which no tokenizer takes."""
    check_shape(text)
    try:
        value = json.loads(text)
    except ValueError as error:  # a number of thousands of digits is one, too
        why = error.msg.lower() if isinstance(error, json.JSONDecodeError) else str(error).partition(":")[0].lower()
        raise Refusal(400, f"Wanted JSON, found something else: {why}. Mend the body.", "json") from None
    if "\\ud" in text or "\\uD" in text:
        check_whole(value)
    return value


def check_whole(value: Any) -> None:
    """Refusal for values with texts that hold half of a surrogate pair."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += each
            left += each.values()
        elif isinstance(each, list):
            left += each
        elif isinstance(each, str) and not each.isascii():
            try:
                each.encode()
            except UnicodeEncodeError:
                raise Refusal(
                    400, "Wanted whole characters, found half of a pair; escape both halves.", "half"
                ) from None


def read_as(model: type[BaseModel], raw: bytes) -> BaseModel:
    """A body as a request of this kind; Refusal or RequestValidationError where it is none."""
    if not raw:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return model.model_validate(parsed(decoded(raw)))
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None


class ReadRequest(Request):
    """A request whose body was read before: FastAPI is handed what it says, and takes that as it is."""

    def __init__(self, request: Request, said: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._said = said

    async def body(self) -> bytes:
        """That there is one; its bytes are gone."""
        return b"{}"

    async def json(self) -> Any:
        """What it says."""
        return self._said


class BodyRoute(APIRoute):
    """A route whose body is decoded, checked and parsed on the server's intake thread, unless the asker goes away."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, behind the reading."""
        handler = super().get_route_handler()
        model = next((each.field_info.annotation for each in self.dependant.body_params), None)
        if model is None:
            return handler

        async def read_first(request: Request) -> Response:
            threads = request.app.state.threads
            reading = threads.run(threads.intake, read_as, model, await request.body())
            said = await unless_gone(request.receive, reading)
            return await handler(ReadRequest(request, said))

        return read_first
