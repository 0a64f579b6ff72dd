"""HTTP to one server: requests that are sent again where nothing was lost, bounded replies, errors in words.

Nothing that comes back is trusted: replies and lines have a largest size, compression is not accepted, redirects are
not followed, and what is no JSON object is an error.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterable
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
MAX_REPLY_NBYTES = 64 << 20
"""Largest whole reply, and largest stream."""
MAX_LINE_NBYTES = 8 << 20
"""Longest line of a stream: an event with the trace of a prompt."""
MAX_ERROR_CHARS = 500
"""Characters of a server's own error message that are passed on."""
BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a server that did nothing yet and may answer later."""
MAX_WAIT_S = 60.0
"""Most seconds between two tries, whatever Retry-After says."""


class AgainError(Exception):
    """An error before anything was answered, after which the request may be sent again.

    Args:
        error: What the caller gets if no further try is left.
        wait_s: Seconds that the server asks to wait; None: it does not say.
    """

    def __init__(self, error: RagFuseError, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.wait_s = error, wait_s


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
        return self._whole("GET", path, b"")

    def delete(self, path: str) -> Any:
        """Send a DELETE and return the JSON of the response; None where there is nothing to delete."""
        return self._whole("DELETE", path, b"")

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
        options = self._options()
        async with httpx.AsyncClient(**options) as client:
            response = await self._opened(client, path, body)
            try:
                yield self._lines(response)
            finally:
                await response.aclose()

    async def _opened(self, client: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
        try:
            async for attempt in AsyncRetrying(**_policy(self._address.max_retries)):
                with attempt:
                    return await self._begun(client, path, body)
        except AgainError as again:
            raise again.error from again.__cause__
        raise AssertionError("tenacity returned without a result")

    async def _begun(self, client: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
        url = self._address.url(path)
        try:
            request = client.build_request("POST", url, content=body, headers=self._address.headers)
            response = await client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code == 200 and _kind(response) == "text/event-stream":
            return response
        try:
            raw = bytearray()
            async for piece in response.aiter_raw():
                raw += piece
                _check_size(len(raw), MAX_REPLY_NBYTES)
        except httpx.HTTPError as error:
            raise self._broken(error) from error
        finally:
            await response.aclose()
        if response.status_code == 200:
            raise self._strange(f"a body of type {_kind(response)!r:.60} where a stream of events was wanted")
        raise self._refusal(response, bytes(raw))

    async def _lines(self, response: httpx.Response) -> AsyncIterator[Any]:
        buffer, total = bytearray(), 0
        try:
            async for piece in response.aiter_raw():
                total += len(piece)
                _check_size(total, MAX_REPLY_NBYTES)
                buffer += piece
                _check_size(len(buffer) - len(piece), MAX_LINE_NBYTES)
                if b"\n" not in piece:
                    continue
                *lines, rest = bytes(buffer).split(b"\n")
                buffer = bytearray(rest)
                for line in lines:
                    text = line.rstrip(b"\r")
                    if not text.startswith(b"data:"):
                        continue
                    data = text[len(b"data:") :].strip()
                    if data == b"[DONE]":
                        return
                    yield self._event(data)
        except httpx.HTTPError as error:
            raise self._broken(error) from error
        raise ServerError(
            f"The server at {self._address.place} broke off in the middle of its answer. Ask again; its log may "
            "say why."
        )

    def _event(self, data: bytes) -> Any:
        event = _json(data)
        if not isinstance(event, dict):
            raise self._strange(f"an event {data[:60]!r} where a JSON object was wanted")
        if event.get("error") is not None:
            error, kind = _told(event)
            raise _refusal(error, event) if kind == "invalid_request_error" else ServerError(error)
        return event

    def _whole(self, method: str, path: str, body: bytes) -> Any:
        try:
            for attempt in Retrying(**_policy(self._address.max_retries)):
                with attempt:
                    return self._once(method, path, body)
        except AgainError as again:
            raise again.error from again.__cause__
        raise AssertionError("tenacity returned without a result")

    def _once(self, method: str, path: str, body: bytes) -> Any:
        options = self._options()
        url, headers = self._address.url(path), self._address.headers
        try:
            with (
                httpx.Client(**options) as client,
                client.stream(method, url, content=body, headers=headers) as response,
            ):
                raw = _read(response.iter_raw())
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._unreachable(error) from error
        except httpx.HTTPError as error:
            raise self._broken(error) from error
        if response.status_code == 404 and _code(_json(raw)) in ("schema_not_found", "session_not_found"):
            return None
        if response.status_code != 200:
            raise self._refusal(response, raw)
        found = _json(raw)
        if not isinstance(found, dict):
            raise self._strange(f"{raw[:60]!r} where a JSON object was wanted")
        return found

    def _refusal(self, response: httpx.Response, raw: bytes) -> Exception:
        """Return the error for a response other than 200; AgainError where the request may be sent again."""
        status, base_url = response.status_code, self._address.place
        message, kind = _told(_json(raw))
        if status == 401:
            found = "another one" if self._address.api_key else "none"
            return ServerError(
                f"The server at {base_url} wants one of its API keys, found {found}. Give api_key=, or set "
                "RAGFUSE_API_KEY."
            )
        if status in BUSY:
            wait_s = _retry_after(response.headers.get("retry-after"))
            why = message or f"HTTP status {status}"
            error = BusyError(f"The server at {base_url} is busy: {why}", wait_s if wait_s is not None else 5.0)
            return AgainError(error, wait_s)
        if _code(_json(raw)) == "model_not_found":
            return ServerError(f"{message} (asked at {base_url})")
        if message and kind == "invalid_request_error":
            return _refusal(message, _json(raw))
        if message and kind:
            return ServerError(f"The server at {base_url} answers with status {status}: {message}")
        return self._strange(f"HTTP status {status}")

    def _unreachable(self, error: httpx.HTTPError) -> Exception:
        """Return the error for a request that may not have arrived: AgainError where it certainly did not."""
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return self._broken(error)
        return AgainError(
            ServerError(
                f"No server answers at {self._address.place} ({_why(error)}). Start one with `ragfuse serve`, or "
                "correct base_url=."
            )
        )

    def _broken(self, error: httpx.HTTPError) -> ServerError:
        if isinstance(error, httpx.TimeoutException):
            return ServerError(
                f"The server at {self._address.place} was silent for {self._address.timeout_s:g} seconds. Ask again "
                "later."
            )
        return ServerError(
            f"The connection to the server at {self._address.place} broke ({_why(error)}). Ask again; its log may "
            "say why."
        )

    def _strange(self, found: str) -> ServerError:
        return ServerError(
            f"What answers at {self._address.place} is no ragfuse server: found {found}. Wanted the address that "
            f"`ragfuse serve` prints, such as {LOCAL}."
        )

    def _options(self) -> dict[str, Any]:
        """Return the options of an HTTP client; its context for certificates is made once, as that takes long."""
        address = self._address
        timeout = httpx.Timeout(address.timeout_s, connect=min(CONNECT_S, address.timeout_s))
        with self._lock:
            if self._ssl is None:
                is_secure = address.base_url.startswith("https:")
                self._ssl = httpx.create_ssl_context() if is_secure else False
            return {"timeout": timeout, "verify": self._ssl, "trust_env": bool(address.proxy)}


def _policy(max_retries: int) -> dict[str, Any]:
    """Return tenacity's options: which errors are tried again, how often, and after how long."""
    return {
        "retry": retry_if_exception_type(AgainError),
        "stop": stop_after_attempt(1 + max_retries),
        "wait": _wait_s,
        "reraise": True,
    }


def _wait_s(state: RetryCallState) -> float:
    """Return the seconds before the next try: as the server says, else half a second, doubled each time."""
    error = state.outcome.exception() if state.outcome is not None else None
    told = error.wait_s if isinstance(error, AgainError) else None
    return float(min(MAX_WAIT_S, told if told is not None else 0.5 * 2 ** (state.attempt_number - 1)))


def _read(pieces: Iterable[bytes]) -> bytes:
    raw = bytearray()
    for piece in pieces:
        raw += piece
        _check_size(len(raw), MAX_REPLY_NBYTES)
    return bytes(raw)


def _check_size(nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise ServerError(
            f"The server sends more than {limit:,} bytes where an answer was wanted; its connection is closed. Check "
            "what stands at base_url=."
        )


def _json(raw: bytes) -> Any:
    """Return the value of a JSON text; None where it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _told(found: Any) -> tuple[str, str]:
    """Return message and type of an error in OpenAI's form; ("", "") where it is something else."""
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict):
        return "", ""
    message, kind = error.get("message"), error.get("type")
    if not isinstance(message, str) or not isinstance(kind, str):
        return "", ""
    return message[:MAX_ERROR_CHARS], kind


def _refusal(message: str, found: Any) -> InputError:
    """Return the error of a request that the server refuses."""
    return OverlongError(message) if _code(found) == OVERLONG else InputError(message)


def _code(found: Any) -> Any:
    error = found.get("error") if isinstance(found, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for none, and for a date."""
    is_number = value is not None and value.strip().isascii() and value.strip().isdecimal()
    return float(value or 0) if is_number else None


def _kind(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
