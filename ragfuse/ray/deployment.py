"""The two deployments that Ray Serve runs: the front, and the replicas.

The front extracts the chunks from a request's body and forwards the request unchanged. A replica
executes the whole app of `ragfuse serve`. Ray Serve imports this file by name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ragfuse.ray.chunk_router import routed_chunks
from ragfuse.ray.request_router import ROUTED
from ragfuse.serve.keys import Keys
from ragfuse.serve.refusals import APIError, refusal
from ragfuse.serve.request_queue import RETRY_S
from ragfuse.serve.server import make_app
from ragfuse.serve.service import Service
from ragfuse.settings import Settings

REPLICA_HEADER = b"x-ragfuse-replica"
"""The response header that names the replica that answered."""
SENT = frozenset(
    {"type", "asgi", "http_version", "scheme", "root_path", "server", "client"}
    | {"method", "path", "raw_path", "query_string", "headers"}
)
"""Fields of a request's ASGI scope that are sent to a replica."""

Headers = Sequence[tuple[bytes, bytes]]


class ChunkFront:
    """Forwards requests to replicas, and the digests of each request's chunks to the router.

    `api_keys` and `salt` are the arguments of `Keys`.
    """

    def __init__(self, replicas: Any, api_keys: Sequence[str], salt: str) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")
        self._keys = Keys(api_keys, salt)

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        body = await request.body()
        tenant = self._keys.tenant(request.headers.get("authorization"))
        chunks = dict[int, int]()
        if tenant is not None and request.method == "POST":
            chunks = await asyncio.to_thread(routed_chunks, tenant.salt, body)
        told = {name: value for name, value in request.scope.items() if name in SENT}
        try:
            answer = self._replicas.remote(told, body, **{ROUTED: chunks})
            status, found_headers = await anext(answer)
        except BackPressureError:
            return refusal(
                APIError(429, "Too many requests are waiting. Retry later.", "busy", None, RETRY_S)
            )
        except RayActorError:
            message = "The replica that had this request has died. Send the request again."
            return refusal(APIError(503, message, "replica_lost", None, RETRY_S))
        response = StreamingResponse(_pieces(answer), status)
        response.raw_headers = list(found_headers)
        return response


def _log_beside_ray() -> None:
    """Also write the server's log lines to Ray Serve's log of this replica."""
    mine, of_ray = logging.getLogger("ragfuse"), logging.getLogger("ray.serve")
    mine.setLevel(logging.INFO)
    for handler in of_ray.handlers:
        mine.addHandler(handler)


async def _pieces(answer: Any) -> AsyncIterator[bytes]:
    """Yield the body of an answer; cancel the answer if the client disconnects."""
    try:
        async for piece in answer:
            yield piece
    except (asyncio.CancelledError, GeneratorExit):
        answer.cancel()
        raise


class EngineReplica:
    """A replica: the server's app, with engines of its own over the tiers that all replicas share.

    Args:
        settings: The settings that `shared_settings` returned.
        api_keys: The accepted API keys, in the form that `Keys` expects.
        origins: Origins of web pages that may call the server (CORS).
        loopback_only: True if only this machine can reach the server; see `make_app`.
    """

    def __init__(
        self,
        settings: Settings,
        api_keys: Sequence[str],
        origins: Sequence[str],
        loopback_only: bool,
    ) -> None:
        _log_beside_ray()
        self._service = Service(settings, Keys(api_keys, settings.salt))
        self._app = make_app(self._service, origins, loopback_only)
        # loads the model before the first request
        self._service.engine(self._service.keys.tenants[0])
        self._upkeep: asyncio.Task[None] | None = None
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def answer(
        self, told: Mapping[str, Any], body: bytes, routed: Mapping[int, int]
    ) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Yield first the response's status and headers, then the body in pieces.

        Args:
            told: The `SENT` fields of the request's ASGI scope.
            body: The request's body.
            routed: The return value of `routed_chunks`. Only the request router uses this value.
        """
        if self._upkeep is None:
            self._upkeep = asyncio.get_running_loop().create_task(self._service.upkeep())
        messages: asyncio.Queue[Any] = asyncio.Queue()
        gone = asyncio.Event()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {"state": {}, **told}
        running = asyncio.get_running_loop().create_task(self._app(scope, receive, messages.put))
        running.add_done_callback(lambda task: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield (
                        message["status"],
                        [*message.get("headers", ()), (REPLICA_HEADER, self._name)],
                    )
                elif message.get("body"):
                    yield bytes(message["body"])
            await running  # re-raises the app's exception
        finally:
            gone.set()

    def __del__(self) -> None:
        """Finish pending saves. Ray Serve calls this method when the replica stops."""
        service = getattr(self, "_service", None)
        if service is not None:
            service.queue.stop()
            service.cancel()
            service.close()
