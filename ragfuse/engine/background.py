"""Chunks that a question met and the store lacked, or had too far away: seen to after the answer, in the background.

What to encode is told here; how, by the engine; what is promoted, by `planner.py`.
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
"""Source of passages that several prompts held."""

MAX_WAITING_JOBS = 256
"""Runs that may wait to be encoded; more are left for their next question."""
IDLE_WAIT_S = 2.0
"""Seconds that a run waits for a moment in which no answer is written: encoding one takes as long as many tokens."""


@dataclass(frozen=True)
class EncodeJob:
    """A chunk to encode, the text it was made from ("": only its ids are known), and its source.

    far: the run is in the store under this key and was computed all the same, as it loads too slowly from where it is.
    used: nothing is to be encoded; these chunks were used, and may have come to deserve a faster tier.
    run: of a schema, to be encoded as a whole at its positions. prompt: nothing is to be encoded; it may hold passages
    that recur. bare: nothing of that prompt was reused. begins: tokens that a prompt begins with, in the prefix cache;
    the run goes on with its first chunk, which is to be encoded into the prefix cache, too.
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
    """What a prompt lacked, each once, and what was too far away."""
    segments = plan.prompt.segments
    for fetch in plan.unread:
        yield EncodeJob(segments[fetch.segment].tokens, far=fetch.key)
    hits = {fetch.key for fetch in (*plan.fetches, *plan.unread)}
    taken = plan.prompt.taken
    if isinstance(taken, SchemaUse):
        lacking = {segments[at].keys[0] for at, _ in plan.misses} - hits
        yield from (EncodeJob(run.tokens, run=run) for key, run in taken.runs.items() if key in lacking)
        return
    for segment in segments:  # beginnings are kept by `prefix_cache.py`, what is said by `history.py`
        if segment.kind == "chunk" and segment.keys[0] not in hits:
            hits.add(segment.keys[0])
            yield EncodeJob(segment.stored or segment.tokens, segment.text, segment.source)


class BackgroundEncoder:
    """Encodes and saves one run at a time in a thread, so that a question waits for one run at most.

    The thread lives while something waits: a saver that nobody uses holds nothing.
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
        """Nothing waits: what was met in a process that was forked is encoded by it."""
        self._waiting: deque[EncodeJob] = deque()
        self._at_hand: EncodeJob | None = None

    def submit(self, work: EncodeJob) -> None:
        """Encode it some time; the same run waits only once, and what does not fit is dropped and counted."""
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
        """Encode none of these runs, nor learn from a prompt that holds one; wait for what is at hand."""

        def is_left(work: EncodeJob) -> bool:
            ids = work.tokens if work.prompt is None else work.prompt.token_ids
            return not any(holds(ids, run) for run in runs)

        with self._worker.changed:
            self._waiting = deque(filter(is_left, self._waiting))
            at_hand = self._at_hand
            self._worker.changed.wait_for(lambda: at_hand is None or self._at_hand is not at_hand)

    def is_waiting(self, tokens: tuple[int, ...]) -> bool:
        """Whether this run waits to be encoded, or is being encoded."""
        with self._worker.changed:
            works = [*self._waiting, *([self._at_hand] if self._at_hand is not None else [])]
        return any(work.tokens == tokens and work.prompt is None and not work.begins for work in works)

    @property
    def waiting(self) -> int:
        """Runs that wait to be encoded, the one at hand too."""
        with self._worker.changed:
            return len(self._waiting) + (self._at_hand is not None)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits; False if that took longer than `timeout_s`."""
        return self._worker.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Take no more, and finish what waits, or as much of it as `timeout_s` allows; the rest is dropped."""
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
