"""Decode, check and parse request bodies, on a separate thread.

Bytes are decoded once, so that the checks and the parser read the same text. The work on one body is bounded by its
bytes and by `MAX_MARKS`, so that none delays the requests behind it for long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from ragfuse.serve.fields import in_words, told_errors
from ragfuse.serve.guard import unless_disconnected
from ragfuse.serve.refusals import APIError
from ragfuse.text.mended import mended_value

MAX_BODY_DEPTH = 64
"""Nesting depth of objects and lists that a body may have."""
MAX_MARKS = 32_768
"""Strings, objects and lists that a body may hold: each becomes a Python object, up to a hundred times its size."""
MAX_COMMAS = 262_144
"""Commas outside strings, so roughly values, that a body may hold; enough for the token ids of a long prompt."""
SCAN_NBYTES = 1 << 16
"""Bytes that are scanned in one step."""
_BOM = "\ufeff"
_ODD = re.compile(r"\\u(?:[dD]|0000)")
"""Escapes of halves of surrogate pairs and of NUL."""


def decoded(raw: bytes | bytearray) -> str:
    """Decode a body from UTF-8, without a byte order mark.

    Raises:
        APIError: The bytes are not UTF-8, such as UTF-16 or an encoded half of a surrogate pair (400).
    """
    try:
        return raw.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        found = raw[error.start]
        raise APIError(
            400,
            f"The body is not valid UTF-8: found the byte 0x{found:02x} at {error.start:,}. Encode it as UTF-8.",
            "encoding",
        ) from None


def check_shape(raw: bytes) -> None:
    """Raise APIError (400) for JSON that is nested too deep or holds too many values.

    Parsing the first would overflow the stack; parsing the second takes seconds in which nothing else is served. The
    scan takes `SCAN_NBYTES` at a time, while other threads run. After a backslash outside of strings, which valid
    JSON never has, the counts mean nothing.
    """
    signs, depth, marks, commas = np.frombuffer(raw, np.uint8), 0, 0, 0
    in_text = is_escaped = False
    for at in range(0, len(signs), SCAN_NBYTES):
        step = signs[at : at + SCAN_NBYTES]
        quotes, is_escaped = _quotes(step, is_escaped)
        inside = (np.cumsum(quotes, dtype=np.uint8) & 1 == 1) ^ in_text  # from a text's first quote to before its last
        opened = ((step == ord("[")) | (step == ord("{"))) & ~inside
        closed = ((step == ord("]")) | (step == ord("}"))) & ~inside
        deepest = depth + int(np.cumsum(opened.astype(np.int8) - closed.astype(np.int8), dtype=np.int32).max(initial=0))
        depth += int(np.count_nonzero(opened)) - int(np.count_nonzero(closed))
        marks += int(np.count_nonzero(opened)) + int(np.count_nonzero(quotes & inside))
        commas += int(np.count_nonzero((step == ord(",")) & ~inside))
        in_text = bool(inside[-1])
        if deepest > MAX_BODY_DEPTH:
            raise APIError(
                400, f"The JSON is nested more than {MAX_BODY_DEPTH} levels deep. Make it flatter.", "too_deep"
            )
        if marks > MAX_MARKS or commas > MAX_COMMAS:
            raise APIError(
                400,
                f"The body has too much: wanted at most {MAX_MARKS:,} texts, objects and lists, and {MAX_COMMAS:,} "
                "values. Send less at once.",
                "too_many",
            )


def _quotes(step: NDArray[np.uint8], is_escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """Return where quotes begin or end a string (those after an even number of backslashes).

    `is_escaped` says whether an odd number of backslashes precedes the first byte; the second result says the same
    of the first byte after this step.
    """
    quotes, slashes = step == ord('"'), step == ord("\\")
    if not is_escaped and not slashes.any():
        return quotes, False
    indices = np.arange(len(step), dtype=np.int32)
    other = np.where(slashes, np.int32(-1 - is_escaped), indices)
    n_slashes = indices - np.maximum.accumulate(other)  # backslashes in a row that end at each byte
    odd = np.concatenate([[is_escaped], n_slashes[:-1] % 2 == 1])
    return quotes & ~odd, bool(n_slashes[-1] % 2)


def parsed(raw: bytes, wanted: str = "JSON") -> Any:
    """Parse a body, with its texts as `whole_text` does; APIError (400) if it is not JSON.

    `wanted`: what the error message says was wanted.
    """
    text = decoded(raw)
    check_shape(raw)
    try:
        value = json.loads(text)
    except ValueError as error:  # also raised for a number of thousands of digits
        why = error.msg.lower() if isinstance(error, json.JSONDecodeError) else str(error).partition(":")[0].lower()
        raise APIError(400, f"The body is not valid JSON: {why}. Wanted {wanted}; correct it.", "json") from None
    return mended_value(value, "A request") if _ODD.search(text) else value


def read_as(model: type[BaseModel], raw: bytes) -> BaseModel:
    """Parse and validate a body as `model`.

    Raises:
        APIError: It is empty, not JSON, no object, or too large in shape.
        RequestValidationError: `model` does not accept it.
    """
    required = [name for name, each in model.model_fields.items() if each.is_required()]
    wanted = f"a JSON object{f' with {in_words(required)}' if required else ''}"
    if not raw.strip():
        raise APIError(
            400, f"The body is empty; wanted {wanted}. Send one.", "missing", required[0] if required else None
        )
    value = parsed(raw, wanted)
    if not isinstance(value, dict):
        raise APIError(400, f"The body is {_kind(value)}; wanted {wanted}. Send one.", "unusable")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError(told_errors(model, error.errors(include_url=False))) from None


def _kind(value: Any) -> str:
    """Return what a JSON value is, in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "a string" if isinstance(value, str) else "a number"


class ParsedRequest(Request):
    """A request whose body is already parsed and validated; FastAPI gets the result from `json`."""

    def __init__(self, request: Request, value: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Return a placeholder, so that FastAPI asks for `json`; the original bytes are freed."""
        return b"{}"

    async def json(self) -> Any:
        """Return the validated body."""
        return self._value


class BodyRoute(APIRoute):
    """A route whose body is decoded, checked and parsed on the intake thread, unless the client disconnects."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that reads the body first, then calls FastAPI's own handler."""
        handler = super().get_route_handler()
        model = next((each.field_info.annotation for each in self.dependant.body_params), None)
        if model is None:
            return handler

        async def read_first(request: Request) -> Response:
            threads = request.app.state.threads
            reading = threads.run(threads.intake, read_as, model, await request.body())
            body = request.state.body = await unless_disconnected(request.receive, reading)
            return await handler(ParsedRequest(request, body))

        return read_first
