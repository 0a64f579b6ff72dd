"""HTTP to one server: requests that are sent again where nothing was lost, and errors in words."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from ragfuse.errors import BusyError, InputError, OverlongError, ServerError
from ragfuse.remote.address import LOCAL, ServerAddress
from ragfuse.types.request_limits import OVERLONG

try:
    import httpx
    from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
except ImportError as error:
    raise InputError(
        f"A client of a server needs the package {error.name}, which is not installed: pip install 'ragfuse-kv[remote]'"
    ) from error

CONNECT_S = 10.0
"""Seconds that a connection may take to open."""
MAX_ERROR_CHARS = 500
"""Characters of a server's own error message that are passed on."""
BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a server that did nothing yet and may answer later."""
WAIT_S = 5.0
"""Seconds before a busy server is asked again that does not say when."""
MAX_WAIT_S = 60.0
"""Most seconds between two tries, whatever Retry-After says."""
NOT_ARRIVED = (httpx.ConnectError, httpx.ConnectTimeout)
"""Errors before a request arrived."""


class Connection:
    """Sends requests to one server. Thread-safe.

    Args:
        address: The server.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._address, self._lock = address, threading.Lock()
        self._ssl: ssl.SSLContext | bool | None = None

    def get(self, path: str) -> Any:
        """Return the JSON of a route; None for a schema or session that the server does not have."""
        return self._whole("GET", path)

    def delete(self, path: str) -> Any:
        """Send a DELETE and return the JSON of the response; None where there is nothing to delete."""
        return self._whole("DELETE", path)

    def post(self, path: str, body: bytes) -> Any:
        """Return the JSON that a route answers to a body."""
        return self._whole("POST", path, body)

    @asynccontextmanager
    async def events(self, path: str, body: bytes) -> AsyncIterator[AsyncIterator[Any]]:
        """Yield the events of a streamed answer as JSON; it ends with the server's [DONE].

        Raises:
            InputError: The server refuses the request.
            BusyError: It is busy, after all tries.
            ServerError: It cannot be reached, or breaks off.
        """
        async with httpx.AsyncClient(**self._options()) as client:
            try:
                response: httpx.Response = await AsyncRetrying(**self._policy())(self._begun, client, path, body)
            except httpx.HTTPError as error:
                raise self._failed(error) from error
            try:
                yield self._lines(response)
            finally:
                await response.aclose()

    async def _begun(self, client: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
        request = client.build_request("POST", self._address.url(path), content=body)
        response = await client.send(request, stream=True)
        kind = response.headers.get("content-type", "")
        if response.status_code == 200 and kind.startswith("text/event-stream"):
            return response
        try:
            await response.aread()
        finally:
            await response.aclose()
        if response.status_code == 200:
            raise self._strange(f"a body of type {kind!r:.60} where a stream of events was wanted")
        self._refuse(response)

    async def _lines(self, response: httpx.Response) -> AsyncIterator[Any]:
        try:
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                yield self._event(data)
        except httpx.HTTPError as error:
            raise self._failed(error) from error
        raise ServerError(
            f"The server at {self._address.place} broke off in the middle of its answer. Ask again; its log may "
            "say why."
        )

    def _event(self, data: str) -> Any:
        event = _json(data)
        if not isinstance(event, dict):
            raise ServerError(
                f"The server at {self._address.place} broke off in an event, or sends none: found {data[:60]!r}. "
                "Check base_url=, and the server's log."
            )
        if error := _error(event):
            message = str(error.get("message"))[:MAX_ERROR_CHARS]
            raise _refused(message, error) if error.get("type") == "invalid_request_error" else ServerError(message)
        return event

    def _whole(self, method: str, path: str, body: bytes = b"") -> Any:
        try:
            return Retrying(**self._policy())(self._once, method, path, body)
        except httpx.HTTPError as error:
            raise self._failed(error) from error

    def _once(self, method: str, path: str, body: bytes) -> Any:
        with httpx.Client(**self._options()) as client:
            response = client.request(method, self._address.url(path), content=body)
        found = _json(response.content)
        if response.status_code == 404 and _error(found).get("code") in ("schema_not_found", "session_not_found"):
            return None
        if response.status_code != 200:
            self._refuse(response)
        if not isinstance(found, dict):
            raise self._strange(f"{response.content[:60]!r} where a JSON object was wanted")
        return found

    def _refuse(self, response: httpx.Response) -> NoReturn:
        """Raise the error for a response other than 200."""
        status, base_url = response.status_code, self._address.place
        error = _error(_json(response.content))
        message, kind = str(error.get("message") or f"HTTP status {status}")[:MAX_ERROR_CHARS], error.get("type")
        if status == 401:
            found = "another one" if self._address.api_key else "none"
            raise ServerError(
                f"The server at {base_url} wants one of its API keys, found {found}. Give api_key=, or set "
                "RAGFUSE_API_KEY."
            )
        if status in BUSY:
            after = response.headers.get("retry-after", "")  # a date is not read
            raise BusyError(
                f"The server at {base_url} is busy: {message}", float(after) if after.isdecimal() else WAIT_S
            )
        if kind == "invalid_request_error" and error.get("code") != "model_not_found":
            raise _refused(message, error)
        if kind:
            raise ServerError(f"The server at {base_url} answers with status {status}: {message}")
        raise self._strange(f"HTTP status {status}")

    def _failed(self, error: httpx.HTTPError) -> ServerError:
        """Return the error for a request that was not answered."""
        base_url, why = self._address.place, str(error) or type(error).__name__
        if isinstance(error, NOT_ARRIVED):
            return ServerError(
                f"No server answers at {base_url} ({why}). Start one with `ragfuse serve`, or correct base_url=."
            )
        if isinstance(error, httpx.TimeoutException):
            return ServerError(
                f"The server at {base_url} was silent for {self._address.timeout_s:g} seconds. Ask again later."
            )
        return ServerError(f"The connection to the server at {base_url} broke ({why}). Ask again; its log may say why.")

    def _strange(self, found: str) -> ServerError:
        return ServerError(
            f"What answers at {self._address.place} is no ragfuse server: found {found}. Wanted the address that "
            f"`ragfuse serve` prints, such as {LOCAL}."
        )

    def _options(self) -> dict[str, Any]:
        """Return the options of a client; certificates are read once, as that takes long."""
        with self._lock:
            if self._ssl is None:
                self._ssl = httpx.create_ssl_context() if self._address.base_url.startswith("https:") else False
        timeout = httpx.Timeout(self._address.timeout_s, connect=min(CONNECT_S, self._address.timeout_s))
        return {
            "timeout": timeout,
            "verify": self._ssl,
            "headers": self._address.headers,
            "trust_env": bool(self._address.proxy),
        }

    def _policy(self) -> dict[str, Any]:
        """Return tenacity's options: which errors are tried again, how often, and after how long."""
        return {
            "retry": retry_if_exception_type((BusyError, *NOT_ARRIVED)),
            "stop": stop_after_attempt(1 + self._address.max_retries),
            "wait": _wait_s,
            "reraise": True,
        }


def _wait_s(state: RetryCallState) -> float:
    """Return the seconds before the next try: as a busy server says, else half a second, doubled each time."""
    error = state.outcome.exception() if state.outcome is not None else None
    return min(MAX_WAIT_S, error.wait_s if isinstance(error, BusyError) else 0.5 * 2 ** (state.attempt_number - 1))


def _json(raw: bytes | str) -> Any:
    """Return the value of a JSON text; None where it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _error(found: Any) -> dict[str, Any]:
    """Return an error in OpenAI's form; {} where it is something else."""
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {}


def _refused(message: str, error: dict[str, Any]) -> InputError:
    """Return the error of a request that the server refuses."""
    return OverlongError(message) if error.get("code") == OVERLONG else InputError(message)
