"""Background jobs after an answer: encode chunks that it missed, and copy slowly loading ones to a faster tier.

This file makes the jobs of a plan and runs them one by one; `remember.py` carries them out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ragfuse.process.worker import Worker, close_at_exit
from ragfuse.schemas.bind import SchemaUse
from ragfuse.schemas.layout import SchemaRun
from ragfuse.store.radix import holds
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import LoadPlan

log = logging.getLogger("ragfuse.engine")

MAX_WAITING_JOBS = 256
"""Most jobs that may wait; further ones are dropped, and submitted again by the next question that needs them."""
IDLE_WAIT_S = 2.0
"""Seconds that a job waits for a moment in which no answer is generated, as encoding delays many tokens of one."""


JobKind = Literal["chunk", "run", "prefix", "copy", "learn"]
"""What a job does.

- "chunk": encode a chunk.
- "run": encode a run of a schema as a whole, at its positions.
- "prefix": encode a prompt's first chunk into the prefix cache, after the cached prefix before it.
- "copy": copy an entry, which was not read because it loads too slowly from its tier, to a faster tier.
- "learn": search a prompt for recurring passages.
"""


@dataclass(frozen=True)
class EncodeJob:
    """One job of the background encoder; most jobs encode a chunk.

    Args:
        kind: The work, which says which of the other fields are set.
        tokens: Token ids of a "chunk", a "run", the entry of a "copy", or the prompt to "learn" from; for "prefix", the
            ids of prefix and chunk.
        text: The text of a "chunk"; "" where only its ids are known.
        source: Where the text of a "chunk" came from, for people.
        keys: Key of the entry of a "copy".
        run: The run of a schema, for "run".
        plan: The plan of that prompt.
        n_prefix: For "prefix", how many of `tokens` are in the prefix cache already.
    """

    kind: JobKind
    tokens: tuple[int, ...] = ()
    text: str = ""
    source: str = ""
    keys: tuple[ChunkKey, ...] = ()
    run: SchemaRun | None = None
    plan: LoadPlan | None = field(default=None, compare=False)
    n_prefix: int = 0


def jobs_after(plan: LoadPlan) -> Iterator[EncodeJob]:
    """Yield a job for each chunk that a plan missed, and for each entry that loads too slowly."""
    segments = plan.prompt.segments
    for fetch in plan.unread:
        yield EncodeJob("copy", segments[fetch.segment].tokens, keys=(fetch.key,))
    hits = {fetch.key for fetch in (*plan.fetches, *plan.unread)}
    schema_use = plan.prompt.schema_use
    if isinstance(schema_use, SchemaUse):
        lacking = {segments[at].keys[0] for at, _ in plan.misses} - hits
        yield from (EncodeJob("run", run.tokens, run=run) for key, run in schema_use.runs.items() if key in lacking)
        return
    for segment in segments:  # `prefix_cache.py` saves prefixes and turns
        if segment.kind == "chunk" and segment.keys[0] not in hits:
            hits.add(segment.keys[0])
            yield EncodeJob("chunk", segment.stored or segment.tokens, segment.text, segment.source)


class BackgroundEncoder:
    """Runs one job at a time in a thread, so that a question waits for at most one. Thread-safe.

    The thread lives only while jobs wait.

    Args:
        save: Carries out one job.

    Attributes:
        dropped: Number of jobs that were dropped.
    """

    def __init__(self, save: Callable[[EncodeJob], None]) -> None:
        self.dropped = 0
        self._save = save
        self._closed = False
        self._worker = Worker("encode", self._take, self._run)
        self._waiting: deque[EncodeJob] = deque()
        self._current: EncodeJob | None = None
        close_at_exit(self)

    def submit(self, job: EncodeJob) -> None:
        """Queue a job. Equal jobs wait only once; where the queue is full the job is dropped and counted."""
        with self._worker.changed:
            if job in self._waiting or job == self._current:
                return
            if self._closed or len(self._waiting) >= MAX_WAITING_JOBS:
                self.dropped += 1
                return
            self._waiting.append(job)
            if not self._worker.start():
                self.dropped += len(self._waiting)
                self._waiting.clear()

    def forget(self, runs: Collection[tuple[int, ...]]) -> None:
        """Remove jobs with tokens that contain one of these runs, and wait for the current job to end."""
        with self._worker.changed:
            self._waiting = deque(job for job in self._waiting if not any(holds(job.tokens, run) for run in runs))
            current = self._current
            self._worker.changed.wait_for(lambda: current is None or self._current is not current)

    def is_waiting(self, tokens: tuple[int, ...]) -> bool:
        """Return whether this run waits to be encoded or is being encoded."""
        with self._worker.changed:
            jobs = [*self._waiting, *([self._current] if self._current is not None else [])]
        return any(job.tokens == tokens and job.kind not in ("prefix", "learn") for job in jobs)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait, including the current one."""
        with self._worker.changed:
            return len(self._waiting) + (self._current is not None)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs are done; return False if that takes longer than `timeout_s` seconds."""
        return self._worker.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Accept no more jobs and finish the waiting ones; drop those left after `timeout_s` seconds."""
        with self._worker.changed:
            self._closed = True
        if not self.flush(timeout_s):
            with self._worker.changed:
                self.dropped += len(self._waiting)
                self._waiting.clear()
            self.flush()

    def _take(self) -> EncodeJob | None:
        self._current = self._waiting.popleft() if self._waiting else None
        return self._current

    def _run(self, job: EncodeJob) -> None:
        try:
            self._save(job)
        except Exception as error:
            log.warning("A background job (%s) failed; answers are right without it: %s", job.kind, error)
            log.debug("Where it failed", exc_info=True)
