"""API errors in OpenAI's format. Messages say what was wanted, what was found, what to do; they hold no traceback."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

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
from ragfuse.types.request_limits import OVERLONG

log = logging.getLogger("ragfuse.serve")

ERROR_TYPES: tuple[tuple[int, str], ...] = (
    (401, "authentication_error"),
    (404, "not_found_error"),
    (429, "rate_limit_error"),
)
"""OpenAI's error types by status; other statuses below 500 are an "invalid_request_error"."""
CODES = MappingProxyType({"extra_forbidden": "unknown_field", "missing": "missing"})
"""Codes of pydantic's types of errors; others are "unusable"."""
DROP_ADVICE = 'Send fewer or shorter documents, or let the last ones be left out: "ragfuse": {"overflow": "drop"}.'
"""What to do about a prompt that is too long with its documents."""
SESSION_ADVICE = "GET /v1/ragfuse/sessions lists them."
"""What to do about a session that does not exist: a client has no command line on the server's machine."""
SCHEMA_ADVICE = "Register it first: POST /v1/ragfuse/schemas."
"""What to do about a schema that is not registered."""


class APIError(Exception):
    """An error that becomes the HTTP response to a request.

    Args:
        status: The HTTP status.
        message: The text for the client.
        code: A machine-readable code.
        param: The field of the request that is wrong.
        retry_s: Seconds after which the client may retry; sent as Retry-After.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_s = status, message, code, param, retry_s

    @property
    def kind(self) -> str:
        """OpenAI's error type for this status."""
        if self.status >= 500:
            return "server_error"
        return dict(ERROR_TYPES).get(self.status, "invalid_request_error")

    def as_dict(self) -> dict[str, Any]:
        """Return the error object that OpenAI's clients expect."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """Return the error object as JSON."""
        return json.dumps(self.as_dict()).encode()

    def headers(self) -> dict[str, str]:
        """Return the extra response headers: Retry-After, and WWW-Authenticate for status 401."""
        after = {} if self.retry_s is None else {"retry-after": str(max(1, round(self.retry_s)))}
        return {**after, **({"www-authenticate": "Bearer"} if self.status == 401 else {})}


def api_error_of(error: BaseException) -> APIError:
    """Convert an exception into an APIError; errors that the client did not cause are logged, not disclosed."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, PMLError):
        return APIError(400, _over_http(error), "unusable", "pml")
    if isinstance(error, NoSessionError):
        return APIError(404, f"{error.found} {SESSION_ADVICE}", "session_not_found", "id")
    if isinstance(error, OverlongError):
        return APIError(400, f"{error.found} {DROP_ADVICE if error.may_drop else error.advice}".strip(), OVERLONG)
    if isinstance(error, InputError | SettingsError):
        return APIError(400, str(error), "unusable")
    if isinstance(error, StoreError):
        log.error("A request was answered with an error (503), as the store cannot be used: %s", error)
        text = "The store cannot be used now. Retry later; the server's log has the reason."
        return APIError(503, text, "store", None, 30)
    if isinstance(error, TransferError):
        log.error("A request was answered with an error (503), as its KV cannot be handed over: %s", error)
        return APIError(
            503,
            "The KV of this prompt cannot be handed over now. Retry later, or let the engine that decodes compute the "
            "prompt; the server's log has the reason.",
            "transfer",
            None,
            5,
        )
    name = type(error).__name__
    log.error("A request failed with %s", name, exc_info=error)
    known = str(error) if isinstance(error, RagFuseError) else ""
    return APIError(500, known or "Something went wrong in the server; its log has the details.", "internal")


def unreadable(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Convert the first of pydantic's errors into an APIError; an unknown field comes first."""
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    parts = (part for part in first["loc"] if part not in ("body", "query", "path"))
    place = [str(part) for part in parts if not set("-[(") & set(str(part))]  # without alternatives of a type
    name, what = ".".join(place), str(first["msg"])
    code = CODES.get(first["type"], "unusable")
    return APIError(400, f"{name}: {what}" if name else f"The body: {what}", code, name or None)


def _over_http(error: PMLError) -> str:
    """Return the message with the schema's file name only, as paths are not disclosed, and advice for HTTP."""
    advice = SCHEMA_ADVICE if error.advice else ""
    return str(PMLError(error.found, error.wanted, PurePath(error.file).name, error.line, error.column, advice))
