"""Look-ahead decisions from the queue of waiting jobs: prefetching and read buffers (AttentionStore
3.2.1, 3.3).

Jobs are known before they run, so that KV they will read can be prefetched, and KV that none of
them reads can be evicted. Decisions only: the queue is an argument, from head to tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import TypeVar

from ragfuse.types.plan import LoadPlan

T = TypeVar("T")


def to_prefetch(waiting: Iterable[tuple[T, int]], memory_bytes: int) -> Iterator[T]:
    """Yield conversations to prefetch, in queue order, while they fit in memory with all those
    before them.

    Section 3.3.1, by bytes where the paper counts conversations of average size. It ends at the
    first that does not fit, so that later ones do not take its room.

    Args:
        waiting: Conversations of the waiting jobs with their stored bytes, from head to tail.
        memory_bytes: Bytes of memory for them.
    """
    for conversation, nbytes in waiting:
        memory_bytes -= nbytes
        if memory_bytes < 0:
            return
        yield conversation


def layers_before(plan: LoadPlan, n_layers: int) -> int:
    """Return how many layers of a plan to read before its prefill begins, so that no layer waits
    for its KV.

    S_buf = B(T_load L_hist - T_pref L_new) of section 3.2.1, in layers, rounded up; 0 where this
    machine was not measured, or loading hides behind the prefill anyway.
    """
    forecast = plan.forecast
    if forecast is None or not plan.fetches or forecast.load_s <= 0:
        return 0
    share = 1 - forecast.recompute_s / forecast.load_s
    return max(0, ceil(n_layers * share - 1e-9))
