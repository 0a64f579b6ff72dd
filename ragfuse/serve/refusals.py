"""Convert exceptions to HTTP error responses in OpenAI's format, without tracebacks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ragfuse.errors import (
    InputError,
    NoSessionError,
    OverlongError,
    PMLError,
    RagFuseError,
    SettingsError,
    StoreError,
    TransferError,
)
from ragfuse.types.prompt import OVERLONG

log = logging.getLogger("ragfuse.serve")

ERROR_TYPES = MappingProxyType(
    {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
)
"""OpenAI's error types by HTTP status.

The type of any other status is "server_error" from 500 on and "invalid_request_error" below 500.
"""
CODES = MappingProxyType({"extra_forbidden": "unknown_field", "missing": "missing"})
"""Error codes by pydantic's error type. Errors of other types have the code "unusable"."""
UNREAD = (401, 408, 413, 415, 421)
"""Statuses of errors sent before the body is fully read. The connection is then closed."""
SESSION_ADVICE = "GET /v1/ragfuse/sessions lists all sessions."
SCHEMA_ADVICE = "Register the schema first: POST /v1/ragfuse/schemas."


@dataclass(eq=False)
class APIError(Exception):
    """An error that becomes the HTTP response to a request.

    Args:
        status: The HTTP status.
        message: The text for the client.
        code: A machine-readable code.
        param: Name of the invalid field of the request.
        retry_s: Seconds after which the client may retry, sent as the header Retry-After.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_s: float | None = None

    def __str__(self) -> str:
        return self.message

    def as_dict(self) -> dict[str, Any]:
        """Return the error object in OpenAI's format."""
        kind = (
            "server_error"
            if self.status >= 500
            else ERROR_TYPES.get(self.status, "invalid_request_error")
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def refusal(error: APIError) -> Response:
    """Return the HTTP response of an error. A status in `UNREAD` closes the connection."""
    headers = {} if error.retry_s is None else {"retry-after": str(max(1, round(error.retry_s)))}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in UNREAD:
        headers["connection"] = "close"
    return JSONResponse(error.as_dict(), error.status, headers)


def unusable(param: str, message: str) -> APIError:
    """Return an APIError (400) about a field that the server cannot use."""
    return APIError(400, message, "unusable", param)


def api_error_of(error: BaseException) -> APIError:
    """Convert an exception to an APIError. The server's own failures are logged, not disclosed."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError | ValidationError):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return APIError(error.status_code, f"{error.detail}. /docs lists all routes.", "http")
    if isinstance(error, TimeoutError):
        return APIError(
            504,
            "The request timed out. Send the request again; stored KV is reused.",
            "timeout",
            None,
            5,
        )
    if isinstance(error, PMLError):
        # the message has only the schema's file name, not the path, and advice for HTTP
        name, advice = PurePath(error.file).name, SCHEMA_ADVICE if error.advice else ""
        told = PMLError(error.found, error.wanted, name, error.line, error.column, advice)
        return unusable("pml", str(told))
    if isinstance(error, NoSessionError):
        return APIError(404, f"{error.found} {SESSION_ADVICE}", "session_not_found", "id")
    if isinstance(error, InputError | SettingsError):
        code = OVERLONG if isinstance(error, OverlongError) else "unusable"
        return APIError(400, str(error), code, error.argument or None)
    log.error("A request failed with %s: %s", type(error).__name__, error, exc_info=error)
    if isinstance(error, StoreError | TransferError):
        what = "store" if isinstance(error, StoreError) else "transfer"
        return APIError(
            503,
            f"The {what} cannot be used now. Retry later; the server's log has the reason.",
            what,
            None,
            5,
        )
    known = str(error) if isinstance(error, RagFuseError) else ""
    return APIError(
        500, known or "The server failed. The server's log has the details.", "internal"
    )


def _invalid(errors: Sequence[Any]) -> APIError:
    """Convert the first of pydantic's errors to an APIError. Unknown fields take precedence."""
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    parts = (part for part in first["loc"] if part not in ("body", "query", "path"))
    # without the types that pydantic adds for the members of a union, such as `list[str]`
    place = [str(part) for part in parts if not set("-[(") & set(str(part))]
    name, code = ".".join(place), CODES.get(first["type"], "unusable")
    told = str(first["msg"]).replace("Input should be", "wanted")
    what = "there is no such field" if code == "unknown_field" else told
    return APIError(400, f"{name}: {what}" if name else f"The body: {what}", code, name or None)
