"""Checks before a request is parsed: API key, host, size and speed of its body.

They work at the ASGI level, so that nothing of a refused request is parsed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ragfuse.serve.admission import RETRY_S, STOPPING
from ragfuse.serve.keys import LOOPBACK, Keys
from ragfuse.serve.refusals import APIError, refusal_of

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DRAINED = 8
"""A body over the limit is read up to this many times the limit: its sender reads the error only after sending."""
CROWDED = "There are too many connections that all ask something; wanted fewer. Close some, or come again later."
PUBLIC = ("/health",)
"""Paths that need no key."""
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
        nbytes: Returns the largest body allowed, in bytes.
        seconds: Time that a body may take to arrive.
        stopping: Returns whether the server is stopping.
        asked: Called with path and status for each response.
        only_here: Accept only loopback names in the Host header, so that no web page reaches a server without keys
            by DNS rebinding.
        held: Limit on the bytes of all bodies together.
    """

    def __init__(
        self,
        app: App,
        keys: Keys,
        nbytes: Callable[[], int],
        seconds: float,
        stopping: Callable[[], bool],
        asked: RequestObserver,
        only_here: bool,
        held: HeldBytes | None = None,
    ) -> None:
        self._app, self._keys, self._nbytes, self._seconds = app, keys, nbytes, seconds
        self._held = held if held is not None else HeldBytes(sys.maxsize, sys.maxsize, lambda: RETRY_S)
        self._stopping, self._asked, self._only_here = stopping, asked, only_here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and pass on one request; lifespan events pass unchecked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._asked(scope["path"], message["status"])
            await send(message)

        coming, holding = _Coming(receive), _Holding(self._held)
        try:
            try:
                self._admit(scope)
                body = await self._body(scope, coming, holding)
            except APIError as refusal:
                holding.end()
                await self._drain(scope, coming)
                await say(refusal, counted)
                return
            except _GoneError:
                return
            again = _again(body, receive)
            del body
            await self._app(scope, again, counted)
        finally:
            holding.end()

    def _admit(self, scope: Scope) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if self._stopping() and path not in PATHS_WHILE_STOPPING:
            raise APIError(503, STOPPING, "stopping", None, RETRY_S)
        if scope.get("state", {}).get("is_crowded") and path not in PATHS_WHILE_STOPPING:
            raise APIError(503, CROWDED, "busy", None, self._held.wait_s())
        if b"transfer-encoding" in headers and (b"content-length" in headers or scope.get("http_version") == "1.0"):
            raise APIError(400, "Wanted one length of the body, found Transfer-Encoding beside another one.", "http")
        if self._only_here and not _is_here(headers.get(b"host", b"").decode("latin-1")):
            raise APIError(421, "This server answers to localhost alone; wanted that in the Host header.", "host")
        tenant = self._keys.tenant(headers.get(b"authorization", b"").decode("latin-1"))
        if tenant is None and path not in PUBLIC:
            told = "another one" if b"authorization" in headers else "none"
            raise APIError(
                401, f"Wanted one of the server's API keys, found {told}. Send it as 'Bearer KEY'.", "api_key"
            )
        scope.setdefault("state", {})["tenant"] = tenant
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise APIError(415, f"Wanted a body of type application/json, found '{kind[:60]}'.", "content_type")
            if _length(scope) > self._nbytes():
                raise self._too_large()

    async def _body(self, scope: Scope, receive: Receive, holding: _Holding) -> bytes:
        """Read the whole body; APIError where it is too large or too slow, or all held bodies exceed their limit."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return b""
        most, body, tenant = self._nbytes(), bytearray(), scope["state"]["tenant"]
        name = tenant.name if tenant is not None else ""
        try:
            async with asyncio.timeout(self._seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    piece = message.get("body", b"")
                    holding.more(name, len(piece))
                    body += piece
                    if len(body) > most:
                        raise self._too_large()
                    more = message.get("more_body", False)
        except TimeoutError:
            raise APIError(408, f"Wanted the body within {self._seconds:g} seconds. Send it faster.", "slow") from None
        return bytes(body)

    def _too_large(self) -> APIError:
        return APIError(
            413, f"Wanted a body of at most {self._nbytes():,} bytes, found more. Send less at once.", "too_large"
        )

    async def _drain(self, scope: Scope, coming: _Coming) -> None:
        """Read and drop the rest of a refused body, unless that takes long: many clients read only after sending."""
        left = DRAINED * self._nbytes()
        if _length(scope) > left:
            return
        try:
            async with asyncio.timeout(self._seconds / 4):
                while left > 0 and not coming.is_whole:
                    message = await coming()
                    left -= len(message.get("body", b""))
        except TimeoutError:
            return


class _Coming:
    """The messages of an incoming request; `is_whole` becomes true with the last one."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.is_whole = receive, False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.is_whole = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message


class HeldBytes:
    """Counts the bytes of all request bodies in memory, by tenant. Use it from one event loop only.

    Args:
        most: Bytes of all tenants together, at most.
        most_each: Bytes of one tenant, at most.
        wait_s: Returns the seconds after which a refused client should retry.
    """

    def __init__(self, most: int, most_each: int, wait_s: Callable[[], float]) -> None:
        self._most, self._most_each, self.wait_s = most, most_each, wait_s
        self.by_tenant: Counter[str] = Counter()

    def take(self, tenant: str, n: int) -> None:
        """Add `n` bytes; APIError (429) where a limit would be exceeded."""
        if self.by_tenant.total() + n > self._most or self.by_tenant[tenant] + n > self._most_each:
            raise APIError(
                429,
                f"Wanted room for a request, but those that wait or are answered hold {self.by_tenant.total():,} bytes "
                f"already, of at most {self._most:,} ({self._most_each:,} of one tenant). Retry later, or send less.",
                "busy",
                None,
                self.wait_s(),
            )
        self.by_tenant[tenant] += n

    def give(self, tenant: str, n: int) -> None:
        """Release `n` bytes."""
        self.by_tenant[tenant] -= n
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]


class _Holding:
    """The bytes that one request holds in `HeldBytes`, until it ends."""

    def __init__(self, held: HeldBytes) -> None:
        self._held, self._tenant, self._n = held, "", 0

    def more(self, tenant: str, n: int) -> None:
        """Add `n` bytes that arrived."""
        self._held.take(tenant, n)
        self._tenant, self._n = tenant, self._n + n

    def end(self) -> None:
        """Release all of its bytes; further calls do nothing."""
        if self._n:
            self._held.give(self._tenant, self._n)
            self._n = 0


class _GoneError(Exception):
    """The client disconnected."""


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it and raise APIError (499) once the client disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise APIError(499, "Whoever asked went away.", "gone")
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def say(error: BaseException, send: Send) -> None:
    """Send an error response and close the connection, as unread bytes of the body may still come over it."""
    refusal = refusal_of(error)
    told = {**refusal.headers(), "content-type": "application/json", "connection": "close"}
    body = refusal.body()
    headers: Sequence[tuple[bytes, bytes]] = [(k.encode(), v.encode()) for k, v in told.items()]
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _again(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that gives the already read body first, then the messages of the given `receive`."""
    given = [body]  # popped when read, so that the bytes are freed once they are parsed

    async def next_message() -> Message:
        return {"type": "http.request", "body": given.pop(), "more_body": False} if given else await receive()

    return next_message


def _is_here(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name.strip("[]").lower() in LOOPBACK


def _length(scope: Scope) -> int:
    """Return the Content-Length in bytes; 0 without one."""
    told = dict(scope["headers"]).get(b"content-length", b"")
    return int(told) if told.isdigit() else 0
