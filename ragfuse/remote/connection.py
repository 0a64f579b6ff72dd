"""HTTP to one server: requests that are sent again where nothing was lost, and errors in words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ragfuse.errors import BusyError, InputError, OverlongError, RagFuseError, ServerError
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
        self._address = address
        self._options: dict[str, Any] = {
            "timeout": httpx.Timeout(address.timeout_s, connect=min(CONNECT_S, address.timeout_s)),
            # Certificates are read once, as that takes long.
            "verify": httpx.create_ssl_context() if address.base_url.startswith("https:") else False,
            "headers": address.headers,
            "trust_env": not address.is_loopback,
        }

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
        async with httpx.AsyncClient(**self._options) as client:
            try:
                response: httpx.Response = await AsyncRetrying(**self._policy())(self._begun, client, path, body)
                try:
                    yield self._lines(response)
                finally:
                    await response.aclose()
            except httpx.HTTPError as error:
                raise self._failed(error) from error

    async def _begun(self, client: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
        request = client.build_request("POST", self._address.url(path), content=body)
        response = await client.send(request, stream=True)
        if response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream"):
            return response
        try:
            await response.aread()
        finally:
            await response.aclose()
        raise self._refusal(response)

    async def _lines(self, response: httpx.Response) -> AsyncIterator[Any]:
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:"):
                continue
            if data == "[DONE]":
                return
            event = _json(data)
            if error := _error(event):
                raise _refused(error)
            if not event:
                break
            yield event
        raise ServerError(
            f"The server at {self._address.base_url} broke off in the middle of its answer. Ask again; its log may say "
            "why. Check that it is `ragfuse serve`."
        )

    def _whole(self, method: str, path: str, body: bytes = b"") -> Any:
        try:
            return Retrying(**self._policy())(self._once, method, path, body)
        except httpx.HTTPError as error:
            raise self._failed(error) from error

    def _once(self, method: str, path: str, body: bytes) -> Any:
        with httpx.Client(**self._options) as client:
            response = client.request(method, self._address.url(path), content=body)
        found = _json(response.content)
        if response.status_code == 200 and found:
            return found
        if response.status_code == 404 and _error(found).get("code") in ("schema_not_found", "session_not_found"):
            return None
        raise self._refusal(response)

    def _refusal(self, response: httpx.Response) -> RagFuseError:
        """Return the error for a response that is no answer."""
        status, error = response.status_code, _error(_json(response.content))
        message = str(error.get("message") or f"HTTP status {status}")[:MAX_ERROR_CHARS]
        if status in BUSY:
            after = response.headers.get("retry-after", "")  # a date is not read
            wait_s = float(after) if after.isdecimal() else WAIT_S
            return BusyError(f"The server at {self._address.base_url} is busy: {message}", wait_s)
        if error.get("type") == "invalid_request_error" and error.get("code") != "model_not_found":
            return _refused(error)
        return ServerError(
            f"What answers at {self._address.base_url} is no ragfuse server, or takes another api_key=: {message}. "
            f"Wanted the address that `ragfuse serve` prints, such as {LOCAL}."
        )

    def _failed(self, error: httpx.HTTPError) -> ServerError:
        """Return the error for a request that was not answered."""
        base_url, why = self._address.base_url, str(error) or type(error).__name__
        if isinstance(error, NOT_ARRIVED):
            return ServerError(
                f"No server answers at {base_url} ({why}). Start one with `ragfuse serve`, or correct base_url=."
            )
        return ServerError(f"The connection to the server at {base_url} broke ({why}). Ask again; its log may say why.")

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


def _json(raw: bytes | str) -> dict[str, Any]:
    """Return the JSON object of a text; {} where it is none."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _error(found: dict[str, Any]) -> dict[str, Any]:
    """Return an error in OpenAI's form; {} where it is something else."""
    error = found.get("error")
    return error if isinstance(error, dict) else {}


def _refused(error: dict[str, Any]) -> RagFuseError:
    """Return the error of a request that the server refuses or ends."""
    message = str(error.get("message"))[:MAX_ERROR_CHARS]
    if error.get("type") != "invalid_request_error":
        return ServerError(message)
    return OverlongError(message) if error.get("code") == OVERLONG else InputError(message)
