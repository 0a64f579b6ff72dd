"""A server's address, and HTTP requests to the server with safe retries and readable errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ragfuse.errors import (
    BusyError,
    InputError,
    OverlongError,
    RagFuseError,
    ServerError,
    SettingsError,
)
from ragfuse.types.prompt import OVERLONG

LOCAL = "http://127.0.0.1:8000/v1"
"""The default address of `ragfuse serve`."""


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, with the API key and the model to ask for.

    Args:
        base_url: The address that `ragfuse serve` prints, with or without `/v1`.
        api_key: The API key, which is never printed. "" means no key.
        model: Name of the model. "" means any model.
        max_retries: Maximum retries if the server is unreachable or busy.
        timeout_s: Seconds without data from the server after which a request fails.

    Raises:
        SettingsError: The address is not an HTTP URL, or the key cannot be sent.
    """

    base_url: str
    api_key: str = field(default="", repr=False)
    model: str = ""
    max_retries: int = 2
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", _normalised(self.base_url))
        if not (self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key):
            raise SettingsError(
                "The API key has spaces or characters outside ASCII. Copy the key again."
            )


def _normalised(given: str) -> str:
    try:
        parts = urlsplit(given.strip())
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is not a number, or half an IPv6 address
        is_server = False
    if not is_server or parts.username is not None:
        shown = given.rpartition("@")[2]  # drops a password
        raise SettingsError(
            f"base_url must be a URL such as {LOCAL}, without a user name; found {shown!r:.120}."
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}/v1"


try:
    import httpx
    from tenacity import (
        AsyncRetrying,
        RetryCallState,
        Retrying,
        retry_if_exception_type,
        stop_after_attempt,
    )
except ImportError as error:
    raise InputError(
        f"A client needs the package {error.name}. Run: pip install 'ragfuse-kv[remote]'"
    ) from error

Json = dict[str, Any]
CONNECT_S = 10.0
MAX_ERROR_CHARS = 500
BUSY = frozenset({429, 502, 503, 504})
"""HTTP statuses that are raised as BusyError. A request with such a status is retried."""
WAIT_S = 5.0
"""Seconds before a retry if the busy server sends no Retry-After."""
MAX_WAIT_S = 60.0
NOT_FOUND = ("schema_not_found", "session_not_found")
"""Error codes for which `ask` returns None."""


class Connection:
    """Sends requests to one server. Thread-safe."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        key = {"authorization": f"Bearer {address.api_key}"} if address.api_key else {}
        host = urlsplit(address.base_url).hostname
        self._options: dict[str, Any] = {
            "base_url": f"{address.base_url}/",
            "timeout": httpx.Timeout(address.timeout_s, connect=min(CONNECT_S, address.timeout_s)),
            # The certificates are read once, because reading them takes long.
            "verify": (
                httpx.create_ssl_context() if address.base_url.startswith("https:") else False
            ),
            "headers": {**key, "content-type": "application/json"},
            # The local machine is reached without a proxy.
            "trust_env": host not in ("127.0.0.1", "::1", "localhost"),
        }
        self._policy: dict[str, Any] = {
            "retry": retry_if_exception_type((BusyError, httpx.ConnectError, httpx.ConnectTimeout)),
            "stop": stop_after_attempt(1 + address.max_retries),
            "wait": _wait_s,
            "reraise": True,
        }

    def ask(self, method: str, path: str, body: bytes = b"") -> Json | None:
        """Send a request and return the JSON of the response; None if the schema or session does
        not exist.

        Raises:
            InputError: The server rejects the request.
            BusyError: The server is still busy after all retries.
            ServerError: The server is unreachable, is not ragfuse, or fails.
        """

        def once() -> Json | None:
            with httpx.Client(**self._options) as client:
                response = client.request(method, path, content=body)
            found = _json(response.content)
            if response.status_code == 200 and found:
                return found
            if _told(found).get("code") in NOT_FOUND:
                return None
            raise self._error(response, found)

        with self._one_sentence():
            return Retrying(**self._policy)(once)

    @asynccontextmanager
    async def events(self, path: str, body: bytes) -> AsyncIterator[AsyncIterator[Json]]:
        """Send a request; yield an iterator of the answer's events. Raises errors as `ask` does."""
        with self._one_sentence():
            async with httpx.AsyncClient(**self._options) as client:

                async def begun() -> httpx.Response:
                    request = client.build_request("POST", path, content=body)
                    response = await client.send(request, stream=True)
                    if response.headers.get("content-type", "").startswith("text/event-stream"):
                        return response
                    raise self._error(response, _json(await response.aread()))

                yield self._events(await AsyncRetrying(**self._policy)(begun))

    async def _events(self, response: httpx.Response) -> AsyncIterator[Json]:
        async for line in response.aiter_lines():
            if line.startswith("data:") and line != "data: [DONE]":
                event = _json(line.removeprefix("data:"))
                if "error" in event:
                    raise self._error(response, event)
                yield event

    def _error(self, response: httpx.Response, found: Json) -> RagFuseError:
        """Convert an error response or event to an exception."""
        status, told, url = response.status_code, _told(found), self._address.base_url
        message = str(told.get("message") or f"HTTP status {status}")[:MAX_ERROR_CHARS]
        kind, code = told.get("type"), told.get("code")
        if status in BUSY:
            after = response.headers.get("retry-after", "")  # a date is ignored
            wait_s = float(after) if after.isdecimal() else WAIT_S
            return BusyError(f"The server at {url} is busy: {message}", wait_s)
        if code == OVERLONG:
            return OverlongError(message, "prompt")
        if kind == "invalid_request_error" and code != "model_not_found":
            return InputError(message)
        if kind == "server_error":
            return ServerError(message)
        return ServerError(
            f"The server at {url} is not ragfuse, or needs another api_key=: {message.rstrip('.')}."
            f" Use the address that `ragfuse serve` prints, such as {LOCAL}."
        )

    @contextmanager
    def _one_sentence(self) -> Iterator[None]:
        """Convert a connection failure of any kind to a ServerError with one message."""
        try:
            yield
        except httpx.HTTPError as error:
            raise ServerError(
                f"No server answers at {self._address.base_url}, or the connection broke"
                f" ({str(error) or type(error).__name__}). Start a server with `ragfuse serve`,"
                " correct the address, or try again."
            ) from error


def _wait_s(state: RetryCallState) -> float:
    """Return the seconds before a retry: BusyError.wait_s, or a growing delay if unreachable."""
    error = state.outcome.exception() if state.outcome is not None else None
    wait_s = error.wait_s if isinstance(error, BusyError) else 0.25 * 2**state.attempt_number
    return min(MAX_WAIT_S, wait_s)


def _json(raw: bytes | str) -> Json:
    """Parse a JSON object; return {} for anything else."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _told(found: Json) -> Json:
    error = found.get("error")
    return error if isinstance(error, dict) else {}
