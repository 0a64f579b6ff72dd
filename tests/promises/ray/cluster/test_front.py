"""What a client gets of the front where the replica that has its request dies; the replica's handle
is a stand-in.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from starlette.requests import Request
from starlette.responses import Response

from ragfuse.ray.deployment import ChunkFront

DEATHS = (ActorDiedError(), ActorUnavailableError("it does not answer", None))
BODY = b'{"model": "m", "messages": []}'


class DyingReplicas:
    """A handle of replicas that yield some messages and then die."""

    def __init__(self, death: RayActorError, *messages: Any) -> None:
        self.death, self.messages = death, messages

    def options(self, **given: Any) -> DyingReplicas:
        return self

    async def remote(self, *given: Any, **routed: Any) -> AsyncIterator[Any]:
        for message in self.messages:
            yield message
        raise self.death


async def asked(replicas: DyingReplicas) -> tuple[Response, bytes]:
    """The response, and its body read to its end."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
        "query_string": b"",
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BODY, "more_body": False}

    response = await ChunkFront(replicas, (), "")(Request(scope, receive))
    pieces = getattr(response, "body_iterator", None)
    return response, bytes(response.body) if pieces is None else b"".join(
        [piece async for piece in pieces]
    )


@pytest.mark.parametrize("death", DEATHS)
def test_before_an_answer_begins_it_is_an_error_of_the_api_that_says_to_repeat(
    death,
):
    response, body = asyncio.run(asked(DyingReplicas(death)))
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("server_error", "replica_lost")
    assert "Send the request again" in error["message"]


@pytest.mark.parametrize("kind", [b"text/event-stream; charset=utf-8", b"application/json"])
@pytest.mark.parametrize("death", DEATHS)
def test_a_body_that_has_begun_breaks_off(death: RayActorError, kind: bytes) -> None:
    head = 200, [(b"content-type", kind)]
    with pytest.raises(RayActorError):
        asyncio.run(asked(DyingReplicas(death, head, b"{")))
