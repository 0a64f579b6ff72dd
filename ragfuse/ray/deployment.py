"""The two classes that Ray Serve runs: the front that knows each request's chunks, and the replicas that answer.

A front reads a request's body for its chunks and hands it on as it came; a replica runs the server's own app, so that
all of the server's rules hold: keys, tenants, limits, streams, errors. Ray Serve loads this file by its name.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ragfuse.ray.chunk_router import RoutedRequest, chunk_digest
from ragfuse.ray.digests import HeldChunks, packed, routed_request, texts_of
from ragfuse.ray.request_router import HELD, ROUTED
from ragfuse.serve.admission import RETRY_S
from ragfuse.serve.app import make_app
from ragfuse.serve.keys import APITenant, Keys
from ragfuse.serve.refusals import APIError, refusal
from ragfuse.serve.service import Service
from ragfuse.settings import Settings

SERIAL = "serial"
"""The field of a replica's routing statistics with the number of requests that it has got: what tells reports apart."""
REPLICA_HEADER, HELD_HEADER = b"x-ragfuse-replica", b"x-ragfuse-held-bytes"
"""Response headers: the replica that answered; of the bytes of the request's chunks, those in its memory at arrival,
as "held/all" of text. Its conversation is not counted; there is none for a request without chunks."""
HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
"""Headers that are not for the next hop (RFC 9110, section 7.6.1); a body arrives whole, with its length."""

LOST = "replica_lost"
"""The code of the error of a request whose replica died."""

Headers = Sequence[tuple[bytes, bytes]]


class ChunkFront:
    """Hands requests on to replicas, with the digests of their chunks for the request router.

    Args:
        replicas: The handle of the replicas.
        api_keys: The accepted keys, as `Keys` takes them.
        salt: The salt of all requests where there are no keys.
    """

    def __init__(self, replicas: Any, api_keys: Sequence[str], salt: str) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")
        self._keys = Keys(api_keys, salt)

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        body = await request.body()
        tenant = self._keys.tenant(request.headers.get("authorization"))
        routed = RoutedRequest()
        if tenant is not None and request.method == "POST":
            routed = await asyncio.to_thread(routed_request, tenant.salt, body)
        headers = [pair for pair in request.scope["headers"] if pair[0] not in (*HOP_BY_HOP, b"content-length")]
        if request.method in ("POST", "PUT", "PATCH"):
            headers.append((b"content-length", str(len(body)).encode()))
        names = "method", "path", "raw_path", "query_string", "client"
        told = {**{name: request.scope[name] for name in names if name in request.scope}, "headers": headers}
        try:
            answer = self._replicas.remote(told, body, **{ROUTED: routed})
            status, found_headers = await anext(answer)
        except BackPressureError:
            return refusal(APIError(429, "Too many requests wait already. Retry later.", "busy", None, RETRY_S))
        except RayActorError:
            return refusal(_lost())
        is_events = any(
            name == b"content-type" and value.startswith(b"text/event-stream") for name, value in found_headers
        )
        response = StreamingResponse(_pieces(answer, is_events), status)
        response.raw_headers = list(found_headers)
        return response


def _lost() -> APIError:
    """Return the error of a request whose replica died."""
    message = "The replica that answered this request has died. Send the request again: another replica takes it."
    return APIError(503, message, LOST, None, RETRY_S)


def _log_beside_ray() -> None:
    """Write the server's lines, one for each request among them, into the log that Ray Serve has for this replica."""
    mine, of_ray = logging.getLogger("ragfuse"), logging.getLogger("ray.serve")
    mine.setLevel(logging.INFO)
    for handler in of_ray.handlers:
        mine.addHandler(handler)


async def _pieces(answer: Any, is_events: bool) -> AsyncIterator[bytes]:
    """Yield the body of an answer; cancel it where the client is gone.

    Args:
        answer: What the replica yields.
        is_events: Whether the body is server-sent events: the last one says so where the replica dies. Any other body
            then breaks off.
    """
    try:
        async for piece in answer:
            yield piece
    except RayActorError:
        if not is_events:
            raise
        yield b"data: " + json.dumps(_lost().as_dict()).encode() + b"\n\n"
    except (asyncio.CancelledError, GeneratorExit):
        answer.cancel()
        raise


class EngineReplica:
    """One replica: the server's app over engines of its own, which share the store's slow tiers with other replicas.

    Args:
        settings: The settings, with only those tiers that all replicas share.
        api_keys: The accepted keys, as `Keys` takes them.
        origins: Origins of web pages that may call the server (CORS).
        loopback_only: Whether the server listens on a loopback address only.
    """

    def __init__(
        self, settings: Settings, api_keys: Sequence[str], origins: Sequence[str], loopback_only: bool
    ) -> None:
        _log_beside_ray()
        self._keys = Keys(api_keys, settings.salt)
        self._service = Service(settings, self._keys)
        self._app = make_app(self._service, origins, loopback_only)
        self._service.engine(self._keys.tenants[0])  # loads the model before the first request
        self._held: dict[str, HeldChunks] = {}  # by salt
        self._serial = 0
        self._upkeep: asyncio.Task[None] | None = None
        self._notes: set[asyncio.Task[None]] = set()
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def answer(
        self, told: Mapping[str, Any], body: bytes, routed: RoutedRequest
    ) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Yield the status and the headers of the response, then its body in pieces.

        Args:
            told: Of the request: method, path, query and headers.
            body: Its body.
            routed: Its chunks and its conversation.
        """
        if self._upkeep is None:
            self._upkeep = asyncio.get_running_loop().create_task(self._service.upkeep())
        self._serial += 1
        headers = dict(told["headers"])
        tenant = self._keys.tenant(headers.get(b"authorization", b"").decode("latin-1"))
        extra: list[tuple[bytes, bytes]] = [(REPLICA_HEADER, self._name)]
        if tenant is not None and routed.chunks:
            texts = {digest: n for digest, n in routed.chunks.items() if digest != routed.session}
            held, wanted = self._held_bytes(tenant, texts)
            if wanted:
                extra.append((HELD_HEADER, f"{held}/{wanted}".encode()))
        messages: asyncio.Queue[Any] = asyncio.Queue()
        gone = asyncio.Event()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "server": None,
            "state": {},
            **told,
        }
        running = asyncio.get_running_loop().create_task(self._app(scope, receive, messages.put))
        running.add_done_callback(lambda task: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message.get("headers", ()), *extra]
                elif message.get("body"):
                    yield bytes(message["body"])
            await running  # raises what the app raised
        finally:
            gone.set()
            if tenant is not None and routed.chunks:
                self._note_later(tenant, body)

    def record_routing_stats(self) -> dict[str, Any]:
        """Return which chunks are in memory, as salted digests of all tenants together; Ray Serve calls it."""
        digests = list[int]()
        for salt, held in list(self._held.items()):
            digests += held.held(self._in_memory(salt))
        return {HELD: packed(digests), SERIAL: self._serial}

    def __del__(self) -> None:
        """Save what is pending; Ray Serve calls it when the replica stops."""
        service = getattr(self, "_service", None)
        if service is not None:
            service.stop()
            service.cancel()
            service.close()

    def _in_memory(self, salt: str) -> list[Any]:
        """Return the keys of a tenant's entries in memory, of this machine or its GPU."""
        engine = self._service.engine(APITenant(salt)) if salt in self._held else None
        tiers = [tier for tier in engine.store.tiers if not tier.slow] if engine is not None else []
        return [entry.key for tier in tiers for entry in tier.list()]

    def _held_bytes(self, tenant: APITenant, chunks: Mapping[int, int]) -> tuple[int, int]:
        """Return the bytes of a request's chunks that are in memory now, and of all of them."""
        found = set(held.held(self._in_memory(tenant.salt))) if (held := self._held.get(tenant.salt)) else set()
        return sum(nbytes for digest, nbytes in chunks.items() if digest in found), sum(chunks.values())

    def _note_later(self, tenant: APITenant, body: bytes) -> None:
        threads = self._service.threads
        task = asyncio.get_running_loop().create_task(threads.run(threads.ahead, lambda: self._note(tenant, body)))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    def _note(self, tenant: APITenant, body: bytes) -> None:
        """Remember which entries the chunks of a request are, and its conversation."""
        try:
            request = json.loads(body)
        except ValueError:
            return
        held, engine = self._held.setdefault(tenant.salt, HeldChunks()), self._service.engine(tenant)
        for text in texts_of(request) if isinstance(request, dict) else ():
            digest = chunk_digest(tenant.salt, "chunk", text)
            key = held.key(digest)
            held.note(
                digest,
                key
                if key is not None
                else engine.runtime.encoder.key(engine.tokens(text), engine.runtime.encoder.context),
            )
        session = request.get("session_id") if isinstance(request, dict) else None
        if isinstance(session, str):
            held.note(chunk_digest(tenant.salt, "session", session), None)
