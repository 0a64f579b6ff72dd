"""What routes ask of a request: its tenant, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request

from ragfuse.serve.keys import APITenant
from ragfuse.serve.refusals import APIError

T = TypeVar("T")


def tenant_of(request: Request) -> APITenant:
    """Return the tenant whose key a request came with."""
    tenant: APITenant = request.state.tenant
    return tenant


async def unless_disconnected(
    receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]
) -> T:
    """Return the result of `work`, or cancel it and raise APIError (499) once the client
    disconnects.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise APIError(499, "The client closed the connection.", "gone")
    finally:
        for each in (task, disconnect):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
