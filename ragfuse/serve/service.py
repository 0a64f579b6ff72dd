"""The state that all routes share: the tenants' engines over one model, the request queue, the running answers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request

from ragfuse.admin.quotas import Quota, QuotaKeeper
from ragfuse.engine.engine import Engine
from ragfuse.engine.overflow import largest_body
from ragfuse.engine.schema_service import PMLPrompt
from ragfuse.models.embedder import Embedder
from ragfuse.serve.admission import RETRY_S, AdmissionControl, Ticket
from ragfuse.serve.document_records import DocumentRecords
from ragfuse.serve.keys import APITenant, Keys
from ragfuse.serve.live import RecentCounts
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import Job
from ragfuse.serve.request_state import tenant_of, unless_disconnected
from ragfuse.serve.response_records import ResponseRecords
from ragfuse.serve.run import HARD_S, AnswerRequest, AnswerRun
from ragfuse.serve.stats import ServerCounts
from ragfuse.serve.threads import Threads
from ragfuse.sessions.conversation_index import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.text.chat_messages import ChatMessage
from ragfuse.transfer import TransferPlace

log = logging.getLogger("ragfuse.serve")

T = TypeVar("T")
UNKNOWN_BYTES = 4 << 20
"""Largest request body in bytes while no model is loaded."""
DOCUMENTS_PATH = "/v1/ragfuse/documents"
"""The path that takes documents, whose bodies may be larger than a prompt."""
DOCUMENT_NBYTES = 12 << 20
"""Largest body with a document: 8 MiB of PDF in base64, and some room."""
UPKEEP_S = 5.0
"""Seconds between two snapshots of the tenants' counters."""
QUOTA_ROUNDS = 6
"""Snapshots between two checks of the tenants' quotas."""
_INTERRUPTED = (
    "The request was stopped before it was done. Send it again; what is already stored is not computed again."
)


class Service:
    """A service over one model. Each tenant has its own engine, made at its first request, with a share of memory.

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
        self.admission = AdmissionControl(settings.serve_together, settings.serve_waiting, max_each)
        self.counts = ServerCounts(self.admission.jobs)
        self.threads = Threads(settings.serve_together)
        self.transfers = TransferPlace.open(settings) if settings.transfer_url else None
        self.embedder = Embedder(settings.embedder, settings.home)
        self.responses = ResponseRecords(settings)
        self.documents = DocumentRecords(settings, self.embedder.name)
        self.since = int(time.time())
        self._engines: dict[str, Engine] = {}
        self.quotas: dict[str, QuotaKeeper] = {}  # by salt, as the engines are
        self._lock, self._look_ahead_lock = threading.Lock(), threading.Lock()
        self._index, self._engines_expect = ConversationIndex(), False
        self._recent: dict[str, RecentCounts] = {}
        self._runs: set[AnswerRun] = set()
        self._body_bytes: int | None = None

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused because the server stops."""
        return self.admission.stopping

    @property
    def body_bytes(self) -> int:
        """Bytes of the largest request body: the setting, else what fits the model's context once it is loaded."""
        max_bytes = self.settings.serve_body_bytes
        if max_bytes is not None:
            return max_bytes
        if self._body_bytes is None:
            engine = next(iter(list(self._engines.values())), None)
            if engine is None:
                return UNKNOWN_BYTES
            self._body_bytes = largest_body(engine.model)
        return self._body_bytes

    def max_body(self, path: str) -> int:
        """Return the bytes of the largest body of a request to this path."""
        return max(self.body_bytes, DOCUMENT_NBYTES) if path == DOCUMENTS_PATH else self.body_bytes

    def live(self, tenant: APITenant) -> dict[str, Any]:
        """Return what the tenant's engine did lately, and how many requests of all tenants run and wait."""
        snapshot = self.engine(tenant).counters.now()
        found = self._recent.setdefault(tenant.salt, RecentCounts()).as_dict(time.monotonic(), snapshot)
        jobs = self.admission.jobs
        return {"object": "ragfuse.live", "running": jobs.running, "waiting": len(jobs), **found}

    def engine(self, tenant: APITenant) -> Engine:
        """Return a tenant's engine with its model loaded. It may block: do not call it on the event loop."""
        with self._lock:
            if tenant.salt not in self._engines:
                settings, share = self.settings, len(self.keys.tenants)
                limits = settings.serve_tenant_bytes, settings.serve_tenant_texts, settings.serve_tenant_sessions
                quota = Quota(*limits, parts=share)
                changes = {
                    "salt": tenant.salt,
                    "memory_bytes": settings.memory_bytes // share,
                    "gpu_bytes": settings.gpu_bytes // share,
                    "api_keys": (),
                }
                engine = Engine(settings.model_copy(update=changes), conversations=self._index)
                self._engines[tenant.salt] = engine
                name = f"{self.model}-{tenant.name}" if len(self.keys) and tenant.name else self.model
                keeper = self.quotas[tenant.salt] = QuotaKeeper(engine, quota)
                self.counts.show(engine, tenant.salt, name, keeper, shares=share > 1)
            engine = self._engines[tenant.salt]
        engine.model.name = self.model  # clients see no path of this machine
        return engine

    async def begin(
        self, tenant: APITenant, make: Callable[[Engine], Sequence[AnswerRequest]], session: str | None
    ) -> AnswerRun:
        """Wait for the request's turn and start its answers.

        Args:
            tenant: The tenant of the request.
            make: Returns one `AnswerRequest` for each answer to generate; called once, at the turn or before it.
            session: The conversation that the request continues; None for none.

        Raises:
            APIError: The queue is full (429), the time is over (504), or the server stops (503).
        """
        deadline_s, prepared = self._deadline_s(), _PreparedRequests(lambda: self.engine(tenant), make)
        job = await self._wait_for_turn(
            tenant,
            session,
            deadline_s,
            lambda job: self.threads.ahead.submit(self._prefetch_while_waiting, job, tenant, prepared),
        )
        engine, requests = await self._run_in_turn(job, deadline_s, self.threads.planning, prepared.get)

        def done() -> None:
            self._runs.discard(run)
            self.admission.leave(job)
            if self._engines_expect and not self.stopping:
                self.threads.ahead.submit(self.look_ahead)

        try:
            run = AnswerRun(requests, engine, deadline_s, done)
        except BaseException:
            self.admission.leave(job)
            raise
        self._runs.add(run)
        return run

    async def work(
        self, tenant: APITenant, do: Callable[[Engine, Callable[[object], None]], T], computes: bool = True
    ) -> T:
        """Wait for the request's turn and return the result of `do`, for requests other than answers.

        Args:
            tenant: The tenant of the request.
            do: Called with the tenant's engine and a check. It must call the check now and then: that raises an
                APIError once the client has disconnected (499), the time is over (504), or the server stops (503).
            computes: Whether `do` runs the model, which takes long.
        """
        deadline_s, ended = self._deadline_s(), threading.Event()
        job = await self._wait_for_turn(tenant, None, deadline_s, lambda job: None)
        until_s = time.monotonic() + deadline_s - asyncio.get_running_loop().time()

        def check(_: object) -> None:
            if ended.is_set() or self.stopping:
                raise APIError(499 if ended.is_set() else 503, _INTERRUPTED, "stopping", None, RETRY_S)
            if time.monotonic() >= until_s:
                raise APIError(504, _INTERRUPTED, "timeout", None, RETRY_S)

        try:
            pool = self.threads.turns if computes else self.threads.planning
            result = await self._run_in_turn(job, deadline_s + HARD_S, pool, lambda: do(self.engine(tenant), check))
        finally:
            ended.set()
        self.admission.leave(job)
        return result

    async def work_for(
        self, request: Request, do: Callable[[Engine, Callable[[object], None]], T], computes: bool = True
    ) -> T:
        """Return the result of `work` for a request's tenant, as long as its client is there."""
        return await unless_disconnected(request.receive, self.work(tenant_of(request), do, computes))

    async def lookup(self, request: Request, do: Callable[[Engine], T]) -> T:
        """Return the result of `do`, a lookup in the store of a request's tenant; it does not wait in the queue.

        Raises:
            APIError: The time is over (504), or the client has disconnected (499).
        """
        tenant = tenant_of(request)
        work = self.threads.run(self.threads.lookups, lambda: do(self.engine(tenant)))
        try:
            async with asyncio.timeout_at(self._deadline_s()):
                return await unless_disconnected(request.receive, work)
        except TimeoutError:
            raise _late() from None

    def look_ahead(self) -> None:
        """Pass each tenant's engine the conversations whose requests wait, to prefetch and keep them. It may block."""
        with self._look_ahead_lock:
            conversations = self.admission.conversations
            self._engines_expect = bool(conversations)
            with self._lock:
                engines = dict(self._engines)
            for salt, engine in engines.items():
                engine.expect({name: at for at, (whose, name) in enumerate(conversations) if whose == salt})

    async def upkeep(self) -> None:
        """Keep every tenant within its quota, for as long as the server runs."""
        for round_ in count(1):
            await asyncio.sleep(UPKEEP_S)
            if self.transfers is not None:
                await self.threads.run(self.threads.upkeep, self.transfers.sweep_if_due)
            for salt, engine in list(self._engines.items()):
                self._recent.setdefault(salt, RecentCounts()).add(time.monotonic(), engine.counters.now())
            for keeper in () if round_ % QUOTA_ROUNDS else list(self.quotas.values()):
                try:
                    await self.threads.run(self.threads.upkeep, keeper.enforce)
                except Exception as error:
                    log.warning("A tenant's quota could not be enforced now; it is tried again soon: %s", error)

    def stop(self) -> None:
        """Refuse new requests; running answers continue."""
        self.admission.stop()

    def cancel(self) -> None:
        """Cancel all running answers."""
        for run in list(self._runs):
            run.cancel()

    def close(self) -> None:
        """Finish pending saves, and close all engines and files."""
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
            self.quotas.clear()
        for engine in engines:
            engine.close()
        self.responses.close()
        self.documents.close()
        if self.transfers is not None:
            self.transfers.close()

    def _deadline_s(self) -> float:
        """Return the deadline of a request that comes now, on the event loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.serve_timeout_s

    async def _wait_for_turn(
        self, tenant: APITenant, session: str | None, deadline_s: float, on_wait: Callable[[Job[Ticket]], object]
    ) -> Job[Ticket]:
        try:
            async with asyncio.timeout_at(deadline_s):
                job = await self.admission.enter(tenant.name, session, on_wait)
        except TimeoutError:
            raise _late() from None
        if asyncio.get_running_loop().time() >= deadline_s:
            self.admission.leave(job)
            raise _late()
        return job

    async def _run_in_turn(
        self, job: Job[Ticket], deadline_s: float, pool: ThreadPoolExecutor, do: Callable[[], T]
    ) -> T:
        """Return the result of `do`, run on `pool` during the turn of `job`.

        The turn continues afterwards. If `do` fails or the client disconnects, the turn ends, but not before `do` has
        returned, so that never more calls run than there are turns.
        """
        running = asyncio.get_running_loop().run_in_executor(pool, do)
        try:
            async with asyncio.timeout_at(deadline_s):
                return await asyncio.shield(running)
        except BaseException as error:
            running.add_done_callback(lambda task: self._end_turn(job, task))
            if isinstance(error, TimeoutError) and not running.done():
                raise _late() from None
            raise

    def _end_turn(self, job: Job[Ticket], task: asyncio.Future[T]) -> None:
        self.admission.leave(job)
        _ = task.cancelled() or task.exception()  # reading it keeps asyncio from logging it as never retrieved

    def _prefetch_while_waiting(self, job: Job[Ticket], tenant: APITenant, prepared: _PreparedRequests) -> None:
        """Prefetch the KV that a request needs while it waits; errors in it are reported at its turn."""
        if job.work.done():  # its turn has come, or its client has disconnected
            return
        try:
            engine, requests = prepared.get()
            engine.prefetch(_chunk_texts(engine, requests))
            question = requests[0].question
            name = None if isinstance(question, PMLPrompt) else engine.history.name_of(question, requests[0].ask)
            if name is not None:
                self.admission.note(job, (tenant.salt, name))
                self.look_ahead()
        except Exception as error:
            log.debug("Nothing is prefetched for a waiting request: %s", error)


class _PreparedRequests:
    """The engine of a request and the answers to generate, computed once by the first thread that needs them."""

    def __init__(self, engine: Callable[[], Engine], make: Callable[[Engine], Sequence[AnswerRequest]]) -> None:
        self._engine, self._make, self._lock = engine, make, threading.Lock()
        self._prepared: tuple[Engine, Sequence[AnswerRequest]] | None = None

    def get(self) -> tuple[Engine, Sequence[AnswerRequest]]:
        """Return the engine and the answers to generate; raise an error for an invalid request."""
        with self._lock:
            if self._prepared is None:
                engine = self._engine()
                requests = self._make(engine)
                self._prepared = engine, requests
            return self._prepared


def _late() -> APIError:
    return APIError(504, "The server could not begin this request in time. Retry later.", "timeout", None, 5)


def _chunk_texts(engine: Engine, requests: Sequence[AnswerRequest]) -> Iterable[str]:
    """Return the texts of all chunks in the questions, without repetitions."""
    texts: dict[str, None] = {}
    for question in {id(request.question): request.question for request in requests}.values():
        if isinstance(question, PMLPrompt):  # its modules are found through their schema
            continue
        contents = (
            [question] if isinstance(question, str) else [t.content for t in question if isinstance(t, ChatMessage)]
        )
        for content in contents:
            texts |= {piece.text: None for piece in engine.prompts.pieces(content) if piece.kind == "chunk"}
    for request in requests:
        texts |= {text: None for text, _ in request.ask.documents}
    return texts
