"""The state that all routes share: the tenants' engines over one model, the request queue, the running answers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ragfuse.admin.quotas import Quota, QuotaKeeper
from ragfuse.engine.context_window import largest_body
from ragfuse.engine.engine import Engine
from ragfuse.engine.schema_service import PMLPrompt
from ragfuse.serve.admission import RETRY_S, AdmissionControl, Ticket
from ragfuse.serve.guard import HeldBytes
from ragfuse.serve.keys import APITenant, Keys
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import Job
from ragfuse.serve.run import HARD_S, AnswerRequest, AnswerRun
from ragfuse.serve.stats import ServerCounts
from ragfuse.serve.threads import Threads
from ragfuse.sessions.conversation_index import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.text.chat_messages import ChatMessage

log = logging.getLogger("ragfuse.serve")

T = TypeVar("T")
UNKNOWN_BYTES = 4 << 20
"""Largest request body in bytes while no model is loaded."""
UPKEEP_S = 5.0
"""Seconds between two checks of the tenants' quotas."""
_ENOUGH = "It was given up before it was done; what is done is kept. Ask again, and it goes on from there."


class Service:
    """A service over one model. Each tenant has its own engine, made at its first request, with a share of memory.

    Args:
        settings: The server's settings.
        keys: The accepted API keys; None: those in the settings.
    """

    def __init__(self, settings: Settings, keys: Keys | None = None) -> None:
        self.settings = settings
        self.keys = keys if keys is not None else Keys(settings.api_keys, settings.salt)
        self.model = Path(settings.model).name
        share = 2 if len(self.keys.tenants) > 1 else 1
        each = max(1, settings.serve_waiting // share) if share > 1 else None
        self.turnstile = AdmissionControl(settings.serve_together, settings.serve_waiting, each)
        held = settings.serve_held_bytes
        self.held = HeldBytes(held, held // share, lambda: self.turnstile.jobs.backlog_s())
        self.counts = ServerCounts(self.turnstile)
        self.threads = Threads(settings.serve_together)
        self.since = int(time.time())
        self._engines: dict[str, Engine] = {}
        self.quotas: dict[str, QuotaKeeper] = {}  # by salt, as the engines are
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._index, self._is_told = ConversationIndex(), False
        self._runs: set[AnswerRun] = set()
        self._body_bytes: int | None = None

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused because the server stops."""
        return self.turnstile.stopping

    @property
    def body_bytes(self) -> int:
        """Bytes of the largest request body: the setting, else what fits the model's context once it is loaded."""
        told = self.settings.serve_body_bytes
        if told is not None:
            return told
        if self._body_bytes is None:
            engine = next(iter(list(self._engines.values())), None)
            if engine is None:
                return UNKNOWN_BYTES
            self._body_bytes = largest_body(engine.model)
        return self._body_bytes

    def engine(self, tenant: APITenant) -> Engine:
        """Return a tenant's engine with its model loaded. It may block: do not call it on the event loop."""
        with self._lock:
            if tenant.salt not in self._engines:
                engine = self._engines[tenant.salt] = Engine(self._settings_of(tenant), conversations=self._index)
                name = self.model if tenant.name == "all" else f"{self.model}-{tenant.name}"
                keeper = self.quotas[tenant.salt] = QuotaKeeper(engine, self._quota())
                self.counts.show(engine, tenant.salt, name, keeper, shares=len(self.keys.tenants) > 1)
            engine = self._engines[tenant.salt]
        engine.model.name = self.model  # what clients are told is no place on this machine
        return engine

    async def begin(
        self, tenant: APITenant, make: Callable[[Engine], Sequence[AnswerRequest]], session: str | None
    ) -> AnswerRun:
        """Wait for the request's turn and start its answers.

        Args:
            tenant: Who asks.
            make: Turns the request into the answers to generate; called once, at its turn or while it waits.
            session: The conversation that the request continues; None for none.

        Raises:
            APIError: The queue is full (429), the time is over (504), or the server stops (503).
        """
        due_s, wanted = self._due_s(), _Wanted(lambda: self.engine(tenant), make)
        job = await self._turn(
            tenant, session, due_s, lambda job: self.threads.ahead.submit(self._wait, job, tenant, wanted)
        )
        engine, wishes = await self._within(job, due_s, self.threads.planning, wanted.get)

        def done() -> None:
            self._runs.discard(run)
            self.turnstile.leave(job)
            if self._is_told and not self.stopping:
                self.threads.ahead.submit(self.look_ahead)

        try:
            run = AnswerRun(wishes, engine, due_s, done)
        except BaseException:
            self.turnstile.leave(job)
            raise
        self._runs.add(run)
        return run

    async def work(
        self, tenant: APITenant, do: Callable[[Engine, Callable[[object], None]], T], computes: bool = True
    ) -> T:
        """Wait for the request's turn and return the result of `do` on the tenant's engine; not for answers.

        `do` must call its second argument now and then; that raises an APIError where the work has to end: the client
        is gone (499), the time is over (504), or the server stops (503). `computes`: whether `do` runs the model, which
        takes long.
        """
        due_s, gone = self._due_s(), threading.Event()
        job = await self._turn(tenant, None, due_s, lambda job: None)
        until_s = time.monotonic() + due_s - asyncio.get_running_loop().time()

        def check(_: object) -> None:
            if gone.is_set() or self.stopping:
                raise APIError(499 if gone.is_set() else 503, _ENOUGH, "stopping", None, RETRY_S)
            if time.monotonic() >= until_s:
                raise APIError(504, _ENOUGH, "timeout", None, RETRY_S)

        try:
            where = self.threads.turns if computes else self.threads.planning
            found = await self._within(job, due_s + HARD_S, where, lambda: do(self.engine(tenant), check))
        finally:
            gone.set()
        self.turnstile.leave(job)
        return found

    async def look(self, tenant: APITenant, do: Callable[[Engine], T]) -> T:
        """Return the result of a lookup in a tenant's store, which waits for other lookups but not in the queue.

        Raises:
            APIError: The time is over (504).
        """
        try:
            async with asyncio.timeout_at(self._due_s()):
                return await self.threads.run(self.threads.lookups, lambda: do(self.engine(tenant)))
        except TimeoutError:
            raise _late() from None

    def look_ahead(self) -> None:
        """Tell every tenant's engine which conversations wait, so that it prefetches and keeps them. It may block."""
        with self._telling:
            reading = self.turnstile.reading
            self._is_told = bool(reading)
            with self._lock:
                engines = dict(self._engines)
            for salt, engine in engines.items():
                engine.expect({name: at for at, (whose, name) in enumerate(reading) if whose == salt})

    async def upkeep(self) -> None:
        """Keep every tenant within its quota, for as long as the server runs."""
        while True:
            await asyncio.sleep(UPKEEP_S)
            for keeper in list(self.quotas.values()):
                try:
                    await self.threads.run(self.threads.upkeep, keeper.keep)
                except Exception as error:
                    log.warning("What a tenant keeps could not be counted: %s", error)

    def stop(self) -> None:
        """Refuse new requests; running answers continue."""
        self.turnstile.stop()

    def cancel(self) -> None:
        """Cancel all running answers."""
        for run in list(self._runs):
            run.cancel()

    def close(self) -> None:
        """Finish pending saves and close all engines."""
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
            self.quotas.clear()
        for engine in engines:
            engine.close()

    def _quota(self) -> Quota:
        """Return the quota of each tenant."""
        settings = self.settings
        told = settings.serve_tenant_bytes, settings.serve_tenant_texts, settings.serve_tenant_sessions
        return Quota(*told, parts=len(self.keys.tenants))

    def _due_s(self) -> float:
        """Return the deadline of a request that comes now, on the event loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.serve_timeout_s

    async def _turn(
        self, tenant: APITenant, session: str | None, due_s: float, waits: Callable[[Job[Ticket]], object]
    ) -> Job[Ticket]:
        try:
            async with asyncio.timeout_at(due_s):
                job = await self.turnstile.enter(tenant.name, session, waits)
        except TimeoutError:
            raise _late() from None
        if asyncio.get_running_loop().time() >= due_s:
            self.turnstile.leave(job)
            raise _late()
        return job

    async def _within(self, job: Job[Ticket], due_s: float, where: ThreadPoolExecutor, do: Callable[[], T]) -> T:
        """Return the result of a call during the turn of `job`, which continues after it.

        Where the call fails, or its client is gone, the turn ends, but only after the call: there are never more calls
        than turns.
        """
        running = asyncio.get_running_loop().run_in_executor(where, do)
        try:
            async with asyncio.timeout_at(due_s):
                return await asyncio.shield(running)
        except BaseException as error:
            running.add_done_callback(lambda task: self._left(job, task))
            if isinstance(error, TimeoutError) and not running.done():
                raise _late() from None
            raise

    def _left(self, job: Job[Ticket], task: asyncio.Future[T]) -> None:
        self.turnstile.leave(job)
        _ = task.cancelled() or task.exception()  # was told, or nobody is there to be told

    def _wait(self, job: Job[Ticket], tenant: APITenant, wanted: _Wanted) -> None:
        """Prefetch the KV that a request needs while it waits; errors in it are reported at its turn."""
        if job.what.done():  # its turn has come, or nobody waits for it any more
            return
        try:
            engine, wishes = wanted.get()
            prefetch(engine, wishes)
            question = wishes[0].question
            name = None if isinstance(question, PMLPrompt) else engine.session_of(question, wishes[0].ask)
            if name is not None:
                self.turnstile.note(job, (tenant.salt, name))
                self.look_ahead()
        except Exception as error:
            log.debug("What a waiting request reads is not prefetched: %s", error)

    def _settings_of(self, tenant: APITenant) -> Settings:
        share = max(1, len(self.keys.tenants))
        settings = self.settings
        told = {"salt": tenant.salt, "memory_bytes": settings.memory_bytes // share, "api_keys": ()}
        return settings.model_copy(update={**told, "gpu_bytes": settings.gpu_bytes // share})


class _Wanted:
    """The engine of a request and the answers to generate, computed once by the first thread that needs them."""

    def __init__(self, engine: Callable[[], Engine], make: Callable[[Engine], Sequence[AnswerRequest]]) -> None:
        self._engine, self._make, self._lock = engine, make, threading.Lock()
        self._found: tuple[Engine, Sequence[AnswerRequest]] | None = None

    def get(self) -> tuple[Engine, Sequence[AnswerRequest]]:
        """Return the engine and the answers to generate; raise an error for an invalid request."""
        with self._lock:
            if self._found is None:
                engine = self._engine()
                wishes = self._make(engine)
                for question, ask in {id(wish.question): (wish.question, wish.ask) for wish in wishes}.values():
                    engine.check_length(question, ask)  # before anything of it is looked for
                self._found = engine, wishes
            return self._found


def _late() -> APIError:
    return APIError(504, "The request's turn did not come in time. Ask later.", "timeout", None, 5)


def prefetch(engine: Engine, wishes: Sequence[AnswerRequest]) -> None:
    """Start copying the chunks in these questions to memory."""
    engine.prefetch(_texts(engine, wishes))


def _texts(engine: Engine, wishes: Sequence[AnswerRequest]) -> Iterable[str]:
    """Return the texts of all chunks in the questions, each once."""
    texts: dict[str, None] = {}
    for question in {id(wish.question): wish.question for wish in wishes}.values():
        if isinstance(question, PMLPrompt):  # its modules are found by their schema
            continue
        contents = (
            [question] if isinstance(question, str) else [t.content for t in question if isinstance(t, ChatMessage)]
        )
        for content in contents:
            texts |= {piece.text: None for piece in engine.pieces(content) if piece.kind == "chunk"}
    return texts
