"""State shared by all routes: tenants' engines, request queue, threads, metrics, quotas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from ragfuse.engine.engine import Engine
from ragfuse.models.embedder import Embedder
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.serve.keys import APITenant, Keys, tenant_of
from ragfuse.serve.records import DocumentRecords, ResponseRecords
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import RETRY_S, Job, RequestQueue
from ragfuse.serve.run import AnswerRequest, AnswerRun
from ragfuse.sessions.session_store import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.store import Tier
from ragfuse.telemetry.metrics import metrics
from ragfuse.text.chat_messages import ChatMessage, Content
from ragfuse.transfer import TransferPlace
from ragfuse.types.keys import ChunkKey

log = logging.getLogger("ragfuse.serve")

T = TypeVar("T")
ANSWER_NICE, WORKER_NICE = 5, 10
"""`nice` values: for threads that generate answers, and for all other worker threads."""


class Threads:
    """The thread pools of one server.

    Args:
        together: Number of concurrent requests.

    Attributes:
        control: Collects metrics.
        intake: Parses request bodies, one at a time, so that running answers are hardly slowed.
        ahead: Works in the background: look-ahead, prefetching and tenants' quotas.
        planning: Converts request bodies to `AnswerRequest`s.
        lookups: Reads and deletes stored data.
        turns: Answers requests. There are at least two threads per concurrent request: one thread
            generates while the other thread finishes the previous request.
    """

    def __init__(self, together: int) -> None:
        self.control = _executor("control", 2, 0)
        self.intake = _executor("intake", 1)
        self.ahead = _executor("ahead", 1)
        self.planning = _executor("planning", 1)
        self.lookups = _executor("lookups", 2)
        self.turns = _executor("turns", 2 * together + 2, ANSWER_NICE)

    async def run(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        """Execute `call` in a thread of `pool`, and return the result."""
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    def close(self) -> None:
        """Drop queued calls; running calls complete."""
        for each in vars(self).values():
            each.shutdown(wait=False, cancel_futures=True)


def _executor(name: str, n: int, nice: int = WORKER_NICE) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, f"ragfuse-{name}", _lower_priority, (nice,))


def _lower_priority(nice: int) -> None:
    """Lower this thread's priority on Linux, so that the event loop has precedence."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


QUOTA_MARGIN = 0.05
"""Share of a quota that a clean-up frees beyond the excess, so that clean-ups are rare."""


def limits_of(engine: Engine, parts: int) -> dict[str, int]:
    """Return a tenant's maximum texts, sessions and bytes on disk. The bytes may be unlimited.

    Args:
        engine: The tenant's engine.
        parts: Number of tenants. Unless `serve_tenant_bytes` is set, several tenants share the
            disk equally.
    """
    settings = engine.settings
    given = settings.serve_tenant_bytes
    shares = [given or tier.capacity // parts for tier in _capped(engine) if given or parts > 1]
    return {
        **({"bytes": min(shares)} if shares else {}),
        "texts": settings.serve_tenant_texts,
        "sessions": settings.serve_tenant_sessions,
    }


def enforce(engine: Engine, parts: int) -> None:
    """If a tenant exceeds a limit, delete the tenant's oldest entries, texts or sessions. Slow."""
    digest, catalog, limits = engine.digest, engine.catalog.strict, limits_of(engine, parts)
    for tier in _capped(engine):
        entries = [entry for entry in tier.list() if entry.key.model == digest]
        nbytes, doomed = sum(entry.nbytes for entry in entries), list[ChunkKey]()
        excess = _excess(nbytes, limits.get("bytes", nbytes))
        for entry in sorted(entries, key=lambda entry: entry.last_used):
            if excess > 0 and not entry.pinned:
                doomed.append(entry.key)
                excess -= entry.nbytes
        engine.store.forget(doomed, tier.name)
    if excess := _excess(catalog.count_texts(digest), limits["texts"]):
        engine.forget({known.text for known in catalog.texts(digest, excess)})
    sessions = catalog.count_sessions(digest)
    if excess := _excess(sessions, limits["sessions"]):
        engine.sessions.keep_latest(sessions - excess)


def _capped(engine: Engine) -> list[Tier]:
    """Return the tiers with quotas: the disk tiers. Redis and object stores evict by themselves."""
    return [tier for tier in engine.store.tiers if tier.slow and not tier.remote]


def _excess(n: int, limit: int) -> int:
    """Return how many of `n` to delete: the excess and a margin, or 0 if `n` is within `limit`."""
    return n - limit + int(QUOTA_MARGIN * limit) if n > limit else 0


UPKEEP_S = 5.0
"""Seconds between quota checks."""


class Service:
    """State of a server with one model. A tenant's engine is created at the tenant's first request.

    Args:
        settings: The server's settings.
        keys: The accepted API keys. None means the keys in the settings.
    """

    def __init__(self, settings: Settings, keys: Keys | None = None) -> None:
        self.settings = settings = settings.usable()
        self.keys = keys if keys is not None else Keys(settings.api_keys, settings.salt)
        self.names = settings.served_model_name or (Path(settings.model).name,)
        self.model = self.names[0]
        max_each = max(1, settings.serve_waiting // 2) if len(self.keys.tenants) > 1 else None
        self.queue = RequestQueue(settings.serve_together, settings.serve_waiting, max_each)
        self._registry, self._tenants = CollectorRegistry(), dict[str, CollectorRegistry]()
        names, registry = ("path", "status"), self._registry
        self.requests = Counter(
            "ragfuse_requests", "Requests, by path and status.", names, registry=registry
        )
        waiting = Gauge("ragfuse_requests_waiting", "Requests in the queue.", registry=registry)
        waiting.set_function(lambda: len(self.queue))
        running = Gauge("ragfuse_requests_running", "Requests being answered.", registry=registry)
        running.set_function(lambda: len(self.queue.running))
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

    def metrics_of(self, tenant: APITenant) -> bytes:
        """Return the metrics of the server and of a tenant's engine, in Prometheus text format."""
        own = self._tenants.get(tenant.salt, CollectorRegistry())
        return generate_latest(self._registry) + generate_latest(own)

    def check_model(self, name: str) -> None:
        """Raise APIError (404) if `name` is not a name of the server's model."""
        settings = self.settings
        if name not in self.names and (settings.served_model_name or name != settings.model):
            names = ", ".join(f"'{each}'" for each in self.names)
            text = f"This server has the model {names}, not '{name:.80}'. Change `model`."
            raise APIError(404, text, "model_not_found", "model")

    def engine(self, tenant: APITenant) -> Engine:
        """Return a tenant's engine with its model loaded. May block."""
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
                registry = self._tenants[tenant.salt] = CollectorRegistry()
                metrics(engine, registry, name, shares=share > 1)
            engine = self._engines[tenant.salt]
        engine.model.name = self.model  # paths of this machine are not disclosed
        return engine

    async def begin(
        self,
        tenant: APITenant,
        make: Callable[[Engine], Sequence[AnswerRequest]],
        session: str | None,
    ) -> AnswerRun:
        """Wait for a request's turn in the queue, then start the generation of its answers.

        Args:
            tenant: The tenant.
            make: Returns one `AnswerRequest` per answer. Called in a thread immediately, without
                waiting for the request's turn.
            session: Name of the conversation that the request continues, or None.

        Raises:
            APIError: The queue is full (429), or the server is stopping (503).
            TimeoutError: The request's time limit has passed.
        """
        deadline_s = self._deadline_s()

        def prepared() -> tuple[Engine, Sequence[AnswerRequest]]:
            engine = self.engine(tenant)
            return engine, make(engine)

        async with asyncio.timeout_at(deadline_s):
            job = self.queue.join(tenant.salt, session)
            try:
                engine, requests = await self.threads.run(self.threads.planning, prepared)
                if not job.turn.done():
                    self.threads.ahead.submit(self._prefetch, job, engine, requests[0])
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
        """Wait for a request's turn in the queue, call `do` in a thread and return the result.

        Args:
            tenant: The tenant.
            do: Called with the tenant's engine and a function `check`. `do` calls `check` regularly
                with any object. `check` raises APIError (503) if the client has left or the server
                is stopping.

        Raises:
            APIError: The queue is full (429), or the server is stopping (503).
            TimeoutError: The request's time limit has passed.
        """
        is_over = threading.Event()

        def check(_: object) -> None:
            if is_over.is_set() or self.queue.stopping:
                text = "The request was stopped. Send the request again; stored KV is reused."
                raise APIError(503, text, "stopping", None, RETRY_S)

        try:
            async with asyncio.timeout_at(self._deadline_s()):
                job = self.queue.join(tenant.salt)
                try:
                    await job.turn
                except BaseException:
                    self.queue.leave(job)
                    raise
                # The turn ends when `do` returns, even if the client has left earlier, so that the
                # number of running calls never exceeds the number of turns.
                running = asyncio.get_running_loop().run_in_executor(
                    self.threads.turns, lambda: do(self.engine(tenant), check)
                )
                running.add_done_callback(lambda _: self.queue.leave(job))
                return await asyncio.shield(running)
        finally:
            is_over.set()

    async def lookup(self, request: Request, do: Callable[[Engine], T]) -> T:
        """Call `do` with the tenant's engine, without waiting in the queue; return the result.

        Raises:
            TimeoutError: The request's time limit has passed.
        """
        tenant = tenant_of(request)
        async with asyncio.timeout_at(self._deadline_s()):
            return await self.threads.run(self.threads.lookups, lambda: do(self.engine(tenant)))

    def look_ahead(self) -> None:
        """Tell engines which conversations wait, so that the engines prefetch the KV. May block."""
        conversations = self.queue.conversations
        self._engines_expect = bool(conversations)
        for salt, engine in dict(self._engines).items():
            engine.expect(
                {name: at for at, (whose, name) in enumerate(conversations) if whose == salt}
            )

    async def upkeep(self) -> None:
        """Enforce tenants' quotas and delete expired transfers, in a loop until cancelled."""
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
                    log.warning("A tenant's quota could not be enforced; retrying soon: %s", error)

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
        return asyncio.get_running_loop().time() + self.settings.serve_timeout_s

    def _prefetch(self, job: Job, engine: Engine, request: AnswerRequest) -> None:
        if job.turn.done():  # the request has started, or the client has left
            return
        try:
            engine.prefetch(_chunk_texts(engine, request))
            if job.conversation is not None:
                self.look_ahead()
        except Exception as error:
            log.debug("Nothing is prefetched for a waiting request: %s", error)


def _chunk_texts(engine: Engine, request: AnswerRequest) -> list[str]:
    """Return the distinct texts of a request's chunks and documents."""
    question, contents = request.question, list[Content]()
    if isinstance(question, str):
        contents = [question]
    elif not isinstance(question, PMLPrompt):
        contents = [each.content for each in question if isinstance(each, ChatMessage)]
    pieces = (piece for content in contents for piece in engine.prompts.pieces(content))
    chunks = [piece.text for piece in pieces if piece.kind == "chunk"]
    return list(dict.fromkeys([*chunks, *(text for text, _ in request.ask.documents)]))
