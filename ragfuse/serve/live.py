"""What a tenant's engine did lately: tokens a second, reuse and times to the first token, over a minute and an hour.

It is told in snapshots of the engine's counters, taken by the service's upkeep; `/metrics` has the same counters for
programs that keep a history of their own.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ragfuse.telemetry.counters import TOKEN_FATES, TTFT_S, CounterSnapshot

SAMPLE_S = 5.0
"""Least seconds between two snapshots of the last minute."""
MINUTE_S = 60.0
N_MINUTES = 60
"""Minutes that are told one by one."""


class RecentCounts:
    """Snapshots of one engine's counters over the last hour. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._minute: deque[tuple[float, CounterSnapshot]] = deque(maxlen=int(MINUTE_S / SAMPLE_S) + 1)
        self._hour: deque[tuple[float, CounterSnapshot]] = deque(maxlen=N_MINUTES + 1)

    def add(self, now_s: float, snapshot: CounterSnapshot) -> None:
        """Add a snapshot; ones that come faster than needed are left out."""
        with self._lock:
            if not self._minute or now_s - self._minute[-1][0] >= SAMPLE_S - 0.5:
                self._minute.append((now_s, snapshot))
            if not self._hour or now_s - self._hour[-1][0] >= MINUTE_S - 0.5:
                self._hour.append((now_s, snapshot))

    def as_dict(self, now_s: float, snapshot: CounterSnapshot) -> dict[str, Any]:
        """Return the counts until now, in plain JSON types."""
        with self._lock:
            minute, ends = [*self._minute, (now_s, snapshot)], [*self._hour, (now_s, snapshot)]
        (began_s, before), (hour_s, first) = minute[0], ends[0]
        lately, hour, seconds = snapshot.sums - before.sums, snapshot.sums - first.sums, max(now_s - began_s, 1.0)
        return {
            "minute": {
                "seconds": round(seconds, 1),
                "answer_tokens_per_s": round(lately["written"] / seconds, 2),
                "prompt_tokens_per_s": round(sum(lately[fate] for fate in TOKEN_FATES) / seconds, 2),
            },
            "hour": {
                "seconds": round(now_s - hour_s, 1),
                **{fate: hour[fate] for fate in TOKEN_FATES},
                "written": hour["written"],
                "ttft": [now - then for now, then in zip(snapshot.ttft, first.ttft, strict=True)],
                "minutes": _minutes(ends),
            },
            "ttft_bounds_s": list(TTFT_S),
            "hits": {name.removeprefix("hit "): n for name, n in snapshot.sums.items() if name.startswith("hit ")},
            "missed": snapshot.sums["missed"],
        }


def _minutes(ends: Sequence[tuple[float, CounterSnapshot]]) -> list[dict[str, Any]]:
    """Return what was reused in each minute, oldest first."""
    found = []
    for (began_s, before), (ended_s, after) in pairwise(ends):
        sums: Counter[str] = after.sums - before.sums
        fates = {fate: sums[fate] for fate in TOKEN_FATES}
        found.append({"ago_s": round(ends[-1][0] - ended_s, 1), "seconds": round(ended_s - began_s, 1), **fates})
    return found
