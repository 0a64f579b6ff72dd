"""The state that all routes share: the tenants' engines over one model, the request queue, the
running answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import Request

from ragfuse.engine.engine import Engine
from ragfuse.models.embedder import Embedder
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.serve.document_records import DocumentRecords
from ragfuse.serve.keys import APITenant, Keys
from ragfuse.serve.metrics import ServerMetrics
from ragfuse.serve.quotas import enforce
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import RETRY_S, Job, RequestQueue
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.response_records import ResponseRecords
from ragfuse.serve.run import AnswerRequest, AnswerRun
from ragfuse.serve.threads import Threads
from ragfuse.sessions.session_store import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.text.chat_messages import ChatMessage, Content
from ragfuse.transfer import TransferPlace

log = logging.getLogger("ragfuse.serve")

T = TypeVar("T")
UPKEEP_S = 5.0
"""Seconds between two checks of the tenants' quotas."""


class Service:
    """A service over one model. Each tenant has its own engine, made at its first request, with a
    share of memory.

    Args:
        settings: The server's settings.
        keys: The accepted API keys; None: those in the settings.
    """

    def __init__(self, settings: Settings, keys: Keys | None = None) -> None:
        self.settings = settings = settings.usable()
        self.keys = keys if keys is not None else Keys(settings.api_keys, settings.salt)
        self.names = settings.served_model_name or (Path(settings.model).name,)
        self.model = self.names[0]
        max_each = max(1, settings.serve_waiting // 2) if len(self.keys.tenants) > 1 else None
        self.queue = RequestQueue(settings.serve_together, settings.serve_waiting, max_each)
        self.metrics = ServerMetrics(self.queue)
        self.threads = Threads(settings.serve_together)
        self.transfers = TransferPlace.open(settings) if settings.transfer_url else None
        self.embedder = Embedder(settings.embedder, settings.home)
        self.responses = ResponseRecords(settings)
        self.documents = DocumentRecords(settings, self.embedder.name)
        self.since = int(time.time())
        self._engines: dict[str, Engine] = {}  # by salt
        self._lock = threading.Lock()
        self._index = ConversationIndex()
        self._engines_expect = False
        self._runs: set[AnswerRun] = set()

    def check_model(self, name: str) -> None:
        """Raise APIError (404) for a model that this server does not have."""
        settings = self.settings
        if name not in self.names and (settings.served_model_name or name != settings.model):
            names = ", ".join(f"'{each}'" for each in self.names)
            text = f"This server has the model {names}, not '{name:.80}'. Ask for that one."
            raise APIError(404, text, "model_not_found", "model")

    def engine(self, tenant: APITenant) -> Engine:
        """Return a tenant's engine with its model loaded. It may block: do not call it on the event
        loop.
        """
        with self._lock:
            if tenant.salt not in self._engines:
                settings, share = self.settings, len(self.keys.tenants)
                changes = {
                    "salt": tenant.salt,
                    "memory_bytes": settings.memory_bytes // share,
                    "gpu_bytes": settings.gpu_bytes // share,
                    "api_keys": (),
                }
                engine = Engine(settings.model_copy(update=changes), conversations=self._index)
                self._engines[tenant.salt] = engine
                name = (
                    f"{self.model}-{tenant.name}" if len(self.keys) and tenant.name else self.model
                )
                self.metrics.show(engine, tenant.salt, name, shares=share > 1)
            engine = self._engines[tenant.salt]
        engine.model.name = self.model  # clients see no path of this machine
        return engine

    async def begin(
        self,
        tenant: APITenant,
        make: Callable[[Engine], Sequence[AnswerRequest]],
        session: str | None,
    ) -> AnswerRun:
        """Wait for the request's turn and start its answers.

        Args:
            tenant: The tenant of the request.
            make: Returns one `AnswerRequest` for each answer to generate.
            session: The conversation that the request continues; None for none.

        Raises:
            APIError: The queue is full (429), or the server stops (503).
            TimeoutError: The time is over.
        """
        deadline_s = self._deadline_s()

        def prepared() -> tuple[Engine, Sequence[AnswerRequest]]:
            engine = self.engine(tenant)
            return engine, make(engine)

        async with asyncio.timeout_at(deadline_s):
            job = self.queue.join(tenant.name, session)
            try:
                engine, requests = await self.threads.run(self.threads.planning, prepared)
                if not job.turn.done():
                    self.threads.ahead.submit(
                        self._prefetch_while_waiting, job, tenant, engine, requests[0]
                    )
                await job.turn
            except BaseException:
                self.queue.leave(job)
                raise

        def done() -> None:
            self._runs.discard(run)
            self.queue.leave(job)
            if self._engines_expect and not self.queue.stopping:
                self.threads.ahead.submit(self.look_ahead)

        run = AnswerRun(requests, engine, deadline_s, done)
        self._runs.add(run)
        return run

    async def work(
        self,
        tenant: APITenant,
        do: Callable[[Engine, Callable[[object], None]], T],
    ) -> T:
        """Wait for the request's turn and return the result of `do`, for requests other than
        answers.

        Args:
            tenant: The tenant of the request.
            do: Called with the tenant's engine and a check. It must call the check now and then:
                that raises an APIError once nobody waits for the result any more, or the server
                stops (503).

        Raises:
            TimeoutError: The time is over.
        """
        is_over = threading.Event()

        def check(_: object) -> None:
            if is_over.is_set() or self.queue.stopping:
                text = (
                    "The request was stopped before it was done. Send it again; what is stored is"
                    " not computed again."
                )
                raise APIError(503, text, "stopping", None, RETRY_S)

        try:
            async with asyncio.timeout_at(self._deadline_s()):
                job = self.queue.join(tenant.name)
                try:
                    await job.turn
                except BaseException:
                    self.queue.leave(job)
                    raise
                # The turn ends with the work, also if nobody waits for it any more, so that never
                # more calls run than there are turns.
                running = asyncio.get_running_loop().run_in_executor(
                    self.threads.turns, lambda: do(self.engine(tenant), check)
                )
                running.add_done_callback(lambda _: self.queue.leave(job))
                return await asyncio.shield(running)
        finally:
            is_over.set()

    async def lookup(self, request: Request, do: Callable[[Engine], T]) -> T:
        """Return the result of `do`, a lookup in the store of a request's tenant; it does not wait
        in the queue.

        Raises:
            TimeoutError: The time is over.
        """
        tenant = tenant_of(request)
        async with asyncio.timeout_at(self._deadline_s()):
            return await self.threads.run(self.threads.lookups, lambda: do(self.engine(tenant)))

    def look_ahead(self) -> None:
        """Pass each tenant's engine the conversations whose requests wait, to prefetch and keep
        them. It may block, and is called on the one thread of `Threads.ahead`.
        """
        conversations = self.queue.conversations
        self._engines_expect = bool(conversations)
        for salt, engine in dict(self._engines).items():
            engine.expect(
                {name: at for at, (whose, name) in enumerate(conversations) if whose == salt}
            )

    async def upkeep(self) -> None:
        """Keep every tenant within its quota, for as long as the server runs."""
        while True:
            await asyncio.sleep(UPKEEP_S)
            tasks: list[Callable[[], object]] = [
                partial(enforce, engine, len(self.keys.tenants))
                for engine in list(self._engines.values())
            ]
            if self.transfers is not None:
                tasks.append(self.transfers.sweep_if_due)
            for task in tasks:
                try:
                    await self.threads.run(self.threads.ahead, task)
                except Exception as error:
                    log.warning(
                        "A tenant's quota could not be enforced now; it is tried again soon: %s",
                        error,
                    )

    def stop(self) -> None:
        """Refuse new requests; running answers continue."""
        self.queue.stop()

    def cancel(self) -> None:
        """Cancel all running answers."""
        for run in list(self._runs):
            run.cancel()

    def close(self) -> None:
        """Finish pending saves, and close all engines and files."""
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
        for engine in engines:
            engine.close()
        self.responses.close()
        self.documents.close()
        if self.transfers is not None:
            self.transfers.close()

    def _deadline_s(self) -> float:
        """Return the deadline of a request that comes now, on the event loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.serve_timeout_s

    def _prefetch_while_waiting(
        self, job: Job, tenant: APITenant, engine: Engine, request: AnswerRequest
    ) -> None:
        """Prefetch the KV that a request needs while it waits."""
        if job.turn.done():  # its turn has come, or its client has disconnected
            return
        try:
            engine.prefetch(_chunk_texts(engine, request))
            if request.ask.session is not None:
                job.reads = tenant.salt, request.ask.session
                self.look_ahead()
        except Exception as error:
            log.debug("Nothing is prefetched for a waiting request: %s", error)


def _chunk_texts(engine: Engine, request: AnswerRequest) -> list[str]:
    """Return the texts of the chunks in a question, and of its documents; modules are found through
    their schema.
    """
    question, contents = request.question, list[Content]()
    if isinstance(question, str):
        contents = [question]
    elif not isinstance(question, PMLPrompt):
        contents = [each.content for each in question if isinstance(each, ChatMessage)]
    pieces = (piece for content in contents for piece in engine.prompts.pieces(content))
    chunks = [piece.text for piece in pieces if piece.kind == "chunk"]
    return list(dict.fromkeys([*chunks, *(text for text, _ in request.ask.documents)]))
