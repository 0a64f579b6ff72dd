"""Background jobs after an answer: encode chunks that it missed, and copy slowly loading ones to a faster tier.

This file makes the jobs of a plan and runs them one by one; `remember.py` carries them out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from ragfuse.process.fork import at_fork
from ragfuse.process.worker import Worker, close_at_exit
from ragfuse.schemas.bind import SchemaUse
from ragfuse.schemas.layout import SchemaRun
from ragfuse.store.radix import holds
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import LoadPlan
from ragfuse.types.prompt import Prompt

log = logging.getLogger("ragfuse.engine")

LEARNT = "seen again"
"""The source of known chunks that were learnt because several prompts contained them."""

MAX_WAITING_JOBS = 256
"""Most jobs that may wait; further ones are dropped, and submitted again by the next question that needs them."""
IDLE_WAIT_S = 2.0
"""Seconds that a job waits for a moment in which no answer is generated, as encoding delays many tokens of one."""


@dataclass(frozen=True)
class EncodeJob:
    """One job of the background encoder; most jobs encode a chunk.

    Args:
        tokens: The token ids to encode.
        text: The chunk's text; "" where only its ids are known.
        source: Where its text came from, for people.
        far: Key of a stored entry that loads too slowly from its tier and was not read; it is copied to a faster tier.
        used: Keys of chunks that were used and may deserve a faster tier; nothing is encoded.
        run: A run of a schema, to be encoded as a whole at its positions.
        prompt: A prompt to search for recurring passages; nothing is encoded.
        bare: Whether nothing of that prompt was reused.
        begins: How many of `tokens` are a prefix in the prefix cache; the rest is the prompt's first chunk, which is
            encoded into the prefix cache too. 0 for other jobs.
    """

    tokens: tuple[int, ...]
    text: str = ""
    source: str = ""
    far: ChunkKey | None = None
    used: tuple[ChunkKey, ...] = ()
    run: SchemaRun | None = None
    prompt: Prompt | None = None
    bare: bool = False
    begins: int = 0


def jobs_after(plan: LoadPlan) -> Iterator[EncodeJob]:
    """Yield a job for each chunk that a plan missed, and for each entry that loads too slowly."""
    segments = plan.prompt.segments
    for fetch in plan.unread:
        yield EncodeJob(segments[fetch.segment].tokens, far=fetch.key)
    hits = {fetch.key for fetch in (*plan.fetches, *plan.unread)}
    taken = plan.prompt.taken
    if isinstance(taken, SchemaUse):
        lacking = {segments[at].keys[0] for at, _ in plan.misses} - hits
        yield from (EncodeJob(run.tokens, run=run) for key, run in taken.runs.items() if key in lacking)
        return
    for segment in segments:  # `prefix_cache.py` saves prefixes, `history.py` turns
        if segment.kind == "chunk" and segment.keys[0] not in hits:
            hits.add(segment.keys[0])
            yield EncodeJob(segment.stored or segment.tokens, segment.text, segment.source)


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
        self.renew()
        at_fork(self)
        close_at_exit(self)

    def renew(self) -> None:
        """Start with an empty queue; in a forked process too, as the parent runs its own jobs."""
        self._waiting: deque[EncodeJob] = deque()
        self._at_hand: EncodeJob | None = None

    def submit(self, work: EncodeJob) -> None:
        """Queue a job. Equal jobs wait only once; where the queue is full the job is dropped and counted."""
        with self._worker.changed:
            if work in self._waiting or work == self._at_hand:
                return
            if self._closed or len(self._waiting) >= MAX_WAITING_JOBS:
                self.dropped += 1
                return
            self._waiting.append(work)
            if not self._worker.start():
                self.dropped += len(self._waiting)
                self._waiting.clear()

    def forget(self, runs: Collection[tuple[int, ...]]) -> None:
        """Remove jobs with tokens or a prompt that contains one of these runs, and wait for the current job to end."""

        def is_left(work: EncodeJob) -> bool:
            ids = work.tokens if work.prompt is None else work.prompt.token_ids
            return not any(holds(ids, run) for run in runs)

        with self._worker.changed:
            self._waiting = deque(filter(is_left, self._waiting))
            at_hand = self._at_hand
            self._worker.changed.wait_for(lambda: at_hand is None or self._at_hand is not at_hand)

    def is_waiting(self, tokens: tuple[int, ...]) -> bool:
        """Return whether this run waits to be encoded or is being encoded."""
        with self._worker.changed:
            works = [*self._waiting, *([self._at_hand] if self._at_hand is not None else [])]
        return any(work.tokens == tokens and work.prompt is None and not work.begins for work in works)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait, including the current one."""
        with self._worker.changed:
            return len(self._waiting) + (self._at_hand is not None)

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
        self._at_hand = self._waiting.popleft() if self._waiting else None
        return self._at_hand

    def _run(self, work: EncodeJob) -> None:
        try:
            self._save(work)
        except Exception as error:
            log.warning("A chunk of %d tokens was not saved for next time: %s", len(work.tokens), error)
            log.debug("Where it failed", exc_info=True)
