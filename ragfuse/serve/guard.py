"""Checks before a request is parsed: API key, host, size and speed of its body.

They work at the ASGI level, so that nothing of a refused request is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ragfuse.serve.admission import RETRY_S, STOPPING
from ragfuse.serve.keys import LOOPBACK, Keys
from ragfuse.serve.refusals import APIError, api_error_of

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DRAIN_FACTOR = 8
"""A body over the limit is read up to this many times the limit, as its sender reads the error only after sending."""
PUBLIC = ("/health", "/", "/docs")
"""Paths that need no key."""
PAGE_FILES = "/page/"
"""Where the paths of the web page's files begin, which need no key either: they hold no data."""
PATHS_WHILE_STOPPING = ("/health", "/metrics")
"""Paths that are answered while the server stops."""


class RequestObserver(Protocol):
    """A callback for each response, with the request's path and the HTTP status."""

    def __call__(self, path: str, status: int) -> object:
        """Record one response."""
        ...


class Guard:
    """ASGI middleware that checks each request and puts its tenant into the request's state.

    Args:
        app: The app that answers the requests that pass.
        keys: The API keys.
        max_nbytes: Returns the largest body allowed at a path, in bytes.
        timeout_s: Seconds that a body may take to arrive.
        stopping: Returns whether the server is stopping.
        observer: Called with path and status for each response.
        loopback_only: Accept only loopback names in the Host header, so that no web page reaches a server without keys
            by DNS rebinding.
    """

    def __init__(
        self,
        app: App,
        keys: Keys,
        max_nbytes: Callable[[str], int],
        timeout_s: float,
        stopping: Callable[[], bool],
        observer: RequestObserver,
        loopback_only: bool,
    ) -> None:
        self._app, self._keys, self._max_nbytes, self._timeout_s = app, keys, max_nbytes, timeout_s
        self._stopping, self._observer, self._loopback_only = stopping, observer, loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and pass on one request; lifespan events pass unchecked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observer(scope["path"], message["status"])
            await send(message)

        incoming = _IncomingBody(receive)
        try:
            self._admit(scope)
            body = await self._body(scope, incoming)
        except APIError as error:
            await self._drain(scope, incoming)
            await send_error(error, counted)
            return
        except _DisconnectedError:
            return
        replay = _replay(body, receive)
        del body
        await self._app(scope, replay, counted)

    def _admit(self, scope: Scope) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if self._stopping() and path not in PATHS_WHILE_STOPPING:
            raise APIError(503, STOPPING, "stopping", None, RETRY_S)
        # one without any Host, as of a monitor in HTTP/1.0, is no browser's: they all send the name that was resolved
        if self._loopback_only and b"host" in headers and not _is_loopback(headers[b"host"].decode("latin-1")):
            raise APIError(
                421,
                "Without API keys, this server accepts only localhost or 127.0.0.1 in the Host header. Use that name, "
                "or start the server with --api-key.",
                "host",
            )
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        tenant = self._keys.tenant(authorization)
        if tenant is None and path not in PUBLIC and not path.startswith(PAGE_FILES):
            found = "another one" if b"authorization" in headers else "none"
            how = "Send it as 'Bearer KEY'."
            if self._keys.is_with_salt(authorization):
                found, how = "one with its salt", "Send what is behind the colon alone, as 'Bearer KEY'."
            raise APIError(401, f"Wanted one of the server's API keys, found {found}. {how}", "api_key")
        scope.setdefault("state", {})["tenant"] = tenant
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise APIError(415, f"Wanted a body of type application/json, found '{kind[:60]}'.", "content_type")
            if _content_length(scope) > self._max_nbytes(path):
                raise self._too_large(path)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body; APIError where it is too large or too slow."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return b""
        max_bytes, body = self._max_nbytes(scope["path"]), bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _DisconnectedError
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise self._too_large(scope["path"])
                    more = message.get("more_body", False)
        except TimeoutError:
            text = f"The body did not arrive within {self._timeout_s:g} seconds. Send it faster."
            raise APIError(408, text, "slow") from None
        return bytes(body)

    def _too_large(self, path: str) -> APIError:
        return APIError(
            413, f"The body is larger than {self._max_nbytes(path):,} bytes. Send less at once.", "too_large"
        )

    async def _drain(self, scope: Scope, incoming: _IncomingBody) -> None:
        """Read and drop the rest of a refused body unless it is long: many clients read only after sending."""
        remaining = DRAIN_FACTOR * self._max_nbytes(scope["path"])
        if _content_length(scope) > remaining:
            return
        try:
            async with asyncio.timeout(self._timeout_s / 4):
                while remaining > 0 and not incoming.is_whole:
                    message = await incoming()
                    remaining -= len(message.get("body", b""))
        except TimeoutError:
            return


class _IncomingBody:
    """The ASGI messages of a request's body; `is_whole` becomes true with the last one."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.is_whole = receive, False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.is_whole = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message


class _DisconnectedError(Exception):
    """The client disconnected."""


async def unless_disconnected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it and raise APIError (499) once the client disconnects."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise APIError(499, "The client closed the connection.", "gone")
    finally:
        for each in (task, disconnect):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_error(error: BaseException, send: Send) -> None:
    """Send an error response and close the connection, as the client may still be sending the request's body."""
    api_error = api_error_of(error)
    fields = {**api_error.headers(), "content-type": "application/json", "connection": "close"}
    body = api_error.body()
    headers: Sequence[tuple[bytes, bytes]] = [(k.encode(), v.encode()) for k, v in fields.items()]
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": api_error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that gives the already read body first, then the messages of the given `receive`."""
    given = [body]  # popped when read, so that the bytes are freed once they are parsed

    async def next_message() -> Message:
        return {"type": "http.request", "body": given.pop(), "more_body": False} if given else await receive()

    return next_message


def _is_loopback(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name.strip("[]").lower() in LOOPBACK


def _content_length(scope: Scope) -> int:
    """Return the Content-Length in bytes; 0 without one."""
    value = dict(scope["headers"]).get(b"content-length", b"")
    return int(value) if value.isdigit() else 0
