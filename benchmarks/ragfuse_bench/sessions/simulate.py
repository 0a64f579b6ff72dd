"""One server, its queue and its tiers, from event to event: a turn comes, is taken, is answered; KV
is fetched ahead.

Questions are answered in order of arrival, the policies are `ragfuse.plan`'s. Time is the
simulation's own. Counting begins after `warm_turns` turns were taken.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from ragfuse_bench.sessions.server import DISK_BPS, PCIE_BPS, Server
from ragfuse_bench.sessions.tiers import Tiers
from ragfuse_bench.sessions.trace import Talk, Turn, arrivals
from ragfuse_bench.sessions.windows import by_arrival, eviction_window, prefetch_window

from ragfuse.plan.evict import rank_named

LOOK_AGAIN = 1 / 8
"""Of the prefetching window: so many jobs must be taken before it is looked through again."""
TRUNCATED = 0.5
"""Of the context window, its earliest part, that goes when a conversation overflows it (section
4.1).
"""


@dataclass(frozen=True)
class Given:
    """What is simulated: the server, its tiers in bytes, the policy by name (none: nothing is
    kept).

    whole_queue: the policy knows all that wait; else those in the paper's eviction window, others
    count as idle. warm_turns: taken before counting begins.
    """

    server: Server
    memory_bytes: int
    disk_bytes: int
    policy: str
    warm_turns: int = 0
    free_share: float = 0.1
    whole_queue: bool = True


@dataclass
class Tally:
    """Counts after the warm-up. Turns: first ones (no history, or all of it cut), and where the
    others' KV was found.

    first_token_s: from being taken to the first token, summed; saved_tokens: of history that was
    not recomputed. waiting: how many waited when a turn was taken, summed. gpu_s: the GPUs' time,
    prefilling and decoding in full batches. begun_s, ended_s: of the counted time. events, fetched:
    of all time. mean_bytes: S_kv at the end.
    """

    turns: int = 0
    first: int = 0
    ram: int = 0
    disk: int = 0
    missed: int = 0
    first_token_s: float = 0.0
    saved_tokens: int = 0
    waiting: int = 0
    gpu_s: float = 0.0
    begun_s: float = 0.0
    ended_s: float = 0.0
    events: int = 0
    fetched: int = 0
    mean_bytes: float = 0.0

    def rates(self) -> dict[str, float]:
        """Shares of all turns, 0..1: hit, ram, disk; `later_hit` of turns that have a history."""
        turns, hits = max(self.turns, 1), self.ram + self.disk
        later = max(self.turns - self.first, 1)
        return {
            "hit": hits / turns,
            "ram": self.ram / turns,
            "disk": self.disk / turns,
            "later_hit": hits / later,
        }


class Simulation:
    """Runs once. `heard` is told now and then how many turns were taken."""

    def __init__(
        self, talks: Sequence[Talk], given: Given, heard: Callable[[int], Any] | None = None
    ) -> None:
        self._talks, self._given, self._heard = talks, given, heard
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._queue: deque[int] = deque()  # whose questions wait
        self._tiers = Tiers(
            by_arrival
            if given.policy == "fifo"
            else rank_named("lru" if given.policy == "none" else given.policy),
            given.memory_bytes if given.policy != "none" else 0,
            given.disk_bytes if given.policy != "none" else 0,
            given.free_share,
        )
        self._looks_ahead = given.policy == "look-ahead"
        self._next = [0] * len(talks)
        self._history = [0] * len(talks)
        self._places: list[deque[int]] = [deque() for _ in talks]
        self._arrived: list[int] = [0]  # by a question's number: whose it is
        self._known = 1
        self._free = given.server.batch
        self._prefilled_s = 0.0
        self._fetching: int | None = None
        self._wanted: deque[int] = deque()
        self._looked_at = 0
        self._taken = 0
        self.tally = Tally()

    def run(self) -> Tally:
        """All events, in the order of their time; the counts."""
        for at_s, talk in arrivals(self._talks):
            self._at(at_s, self._come, talk)
        tally = self.tally
        while self._events:
            self._now, _, what, about = heapq.heappop(self._events)
            what(about)
            tally.events += 1
            if self._heard is not None and tally.events % 1000 == 0:
                self._heard(self._taken)
        tally.ended_s, tally.mean_bytes = self._now, self._tiers.mean_bytes
        return tally

    # events

    def _at(self, at_s: float, what: Callable[[Any], None], about: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what, about))

    def _come(self, talk: int) -> None:
        """A question comes and waits."""
        self._places[talk].append(len(self._arrived))
        self._arrived.append(talk)
        self._queue.append(talk)
        self._serve()
        self._look()

    def _serve(self) -> None:
        """Take turns while the batch has room."""
        while self._free and self._queue:
            self._free -= 1
            self._begin(self._queue.popleft())

    def _done(self, told: tuple[int, int]) -> None:
        """An answer is there: its KV is saved, its conversation goes on, and the next turn is
        taken.
        """
        (talk, tokens), given = told, self._given
        self._free += 1
        if given.policy != "none":
            self._tiers.save(talk, int(tokens * given.server.token_bytes), self._now)
        turns, index = self._talks[talk], self._next[talk]
        if index < len(turns):
            self._at(self._now + turns[index].pause_s, self._come, talk)
        self._serve()
        self._look()

    def _arrive(self, talk: int) -> None:
        """What was read ahead is in memory."""
        self._fetching = None
        self._tiers.fetch(talk)
        self.tally.fetched += 1
        self._look()

    # what they do

    def _begin(self, talk: int) -> None:
        """A turn is taken: its KV is found or not, it is prefilled after those before it, and
        decoded in the batch.
        """
        self._places[talk].popleft()
        turn = self._talks[talk][self._next[talk]]
        self._next[talk] += 1
        self._tell(talk)
        history, question, answer = self._lengths(talk, turn)
        where = self._tiers.find(talk) if history > 0 else None
        self._tiers.use(talk, self._now)
        computed = question + (history if where is None else 0)
        nbytes = history * self._given.server.token_bytes
        load_s = 0.0 if where is None else nbytes / (DISK_BPS if where == "disk" else PCIE_BPS)
        # From memory, layers are read ahead while the turn before is computed (3.2.1); from disk a
        # turn waits for them.
        work_s = computed * self._given.server.prefill_s
        start_s = max(self._now, self._prefilled_s)
        first_s = start_s + work_s if where != "disk" else max(start_s + work_s, self._now + load_s)
        self._prefilled_s = start_s + work_s
        self._history[talk] = history + question + answer
        self._count(
            where,
            history,
            first_s,
            work_s + answer * self._given.server.step_s / self._given.server.batch,
        )
        done_s = first_s + answer * self._given.server.step_s
        self._at(done_s, self._done, (talk, history + question + answer))

    def _lengths(self, talk: int, turn: Turn) -> tuple[int, int, int]:
        """Tokens of history, question and answer that the window has room for; its earliest half
        goes first.
        """
        window = self._given.server.window
        history = self._history[talk]
        if window is None:
            return history, turn.question, turn.answer
        cut = int(window * TRUNCATED)
        question, answer = min(turn.question, cut), min(turn.answer, cut)
        while history > 0 and history + question + answer > window:
            history = max(0, history - cut)
        return history, question, answer

    def _count(self, where: str | None, history: int, first_s: float, gpu_s: float) -> None:
        self._taken += 1
        tally = self.tally
        if self._taken <= self._given.warm_turns:
            tally.begun_s = self._now
            return
        tally.turns += 1
        tally.first += not history
        tally.ram += where == "ram"
        tally.disk += where == "disk"
        tally.missed += bool(history) and where is None
        tally.first_token_s += first_s - self._now
        tally.gpu_s += gpu_s
        tally.saved_tokens += history if where is not None else 0
        tally.waiting += self._waiting

    # looking ahead

    def _tell(self, talk: int) -> None:
        """Say where the conversation's next job waits, if that is to be known."""
        if self._looks_ahead:
            place = self._places[talk][0] if self._places[talk] else None
            self._tiers.wait(
                talk, float(place) if place is not None and place < self._known else None
            )

    @property
    def _waiting(self) -> int:
        return len(self._arrived) - 1 - self._taken

    def _look(self) -> None:
        """Learn of jobs that came into the window, and fetch the next that memory has room for."""
        if not self._looks_ahead:
            return
        given, end = self._given, len(self._arrived)
        if not given.whole_queue:
            window = eviction_window(given.memory_bytes, given.disk_bytes, self._tiers.mean_bytes)
            end = min(end, self._taken + 1 + window)
        while self._known < end:
            self._known += 1
            self._tell(self._arrived[self._known - 1])
        if self._fetching is None and len(self._tiers.disk):
            self._fetch_next()

    def _fetch_next(self) -> None:
        """Begin to read the next conversation that is wanted; the queue is looked through when a
        part of it is new.
        """
        if not self._wanted:
            window = prefetch_window(self._given.memory_bytes, self._tiers.mean_bytes)
            if self._taken - self._looked_at < window * LOOK_AGAIN and self._waiting > window:
                return
            self._looked_at = self._taken
            wanted = self._tiers.wanted([*islice(self._queue, window)])
            self._wanted.extend(talk for talk in wanted if isinstance(talk, int))
        while self._wanted:
            talk = self._wanted.popleft()
            item = self._tiers.disk.get(talk) if self._places[talk] else None
            if item is not None:
                self._fetching = talk
                self._at(self._now + item.nbytes / DISK_BPS, self._arrive, talk)
                return
