"""What goes along with a request from the guard to its route and back to the log: its tenant and its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request

from ragfuse.serve.keys import APITenant
from ragfuse.serve.refusals import APIError
from ragfuse.serve.run import Completed, TextDelta

T = TypeVar("T")


@dataclass
class TokenCounts:
    """The tokens that a request took: of its prompts, and of its answers."""

    prompt: int = 0
    answer: int = 0

    async def counted(
        self, items: AsyncIterator[TextDelta | Completed], n: int = 1
    ) -> AsyncIterator[TextDelta | Completed]:
        """Yield the items, and add up the tokens of completed answers; a prompt counts once.

        Args:
            items: The items of a run.
            n: Answers to each prompt.
        """
        async for item in items:
            if isinstance(item, Completed):
                self.prompt += item.answer.trace.tokens if item.index % n == 0 else 0
                self.answer += len(item.answer.token_ids)
            yield item


def tenant_of(request: Request) -> APITenant:
    """Return the tenant whose key a request came with."""
    tenant: APITenant = request.state.tenant
    return tenant


def token_counts_of(request: Request) -> TokenCounts:
    """Return the counts that the request's log line will show."""
    counts: TokenCounts = request.state.token_counts
    return counts


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
