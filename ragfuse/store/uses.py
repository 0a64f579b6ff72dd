"""What was used of late, so that a tier hears of uses in others: seldom, never on an answer's way. No I/O, no clock.

A chunk that is always read from memory would otherwise grow old everywhere else, and be dropped there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

from ragfuse.process.fork import at_fork
from ragfuse.store.tier import Tier, Touches
from ragfuse.types.keys import ChunkKey

_REMEMBERED = 1 << 14

Submit = Callable[[str, Callable[[], object]], bool]
"""Runs a job later, in the writer of that tier; False if it is dropped."""


class Uses:
    """Tells each of `tiers` of uses in the others, of a chunk once in some seconds. At most one job waits at each."""

    def __init__(self, tiers: Sequence[Tier], submit: Submit) -> None:
        self._hearers = tuple(tier for tier in tiers if isinstance(tier, Touches))
        self._submit = submit
        self._told: OrderedDict[ChunkKey, float] = OrderedDict()
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """No news waits: those of a process that was forked are told by it."""
        self._lock = Lock()
        self._news: dict[str, dict[ChunkKey, None]] = {tier.name: {} for tier in self._hearers}

    def note(self, key: ChunkKey, source: str, now: float, every_s: float) -> None:
        """A chunk was read from the tier `source` at `now`; the others were told less than `every_s` ago, or are."""
        others = [tier for tier in self._hearers if tier.name != source]
        with self._lock:
            if not others or 0 <= now - self._told.get(key, -every_s) < every_s:
                return
            self._told[key] = now
            self._told.move_to_end(key)
            if len(self._told) > _REMEMBERED:
                self._told.popitem(last=False)
            idle = [tier for tier in others if not self._news[tier.name]]
            for tier in others:
                self._news[tier.name][key] = None
        for tier in idle:
            if not self._submit(tier.name, partial(self._tell, tier)):
                self._forget(tier)

    def _tell(self, tier: Touches) -> None:
        tier.touch(self._take(tier))

    def _forget(self, tier: Touches) -> None:
        """Nobody was told: the next use is news again."""
        for key in self._take(tier):
            with self._lock:
                self._told.pop(key, None)

    def _take(self, tier: Touches) -> dict[ChunkKey, None]:
        with self._lock:
            news, self._news[tier.name] = self._news[tier.name], {}
            return news
