"""Look-ahead decisions from the queue of waiting jobs: prefetching and read buffers (AttentionStore
3.2.1, 3.3).

Jobs are known before they run, so that KV they will read can be prefetched, and KV that none of
them reads can be evicted. Decisions only: the queue is an argument, from head to tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def read_buffer(
    load_s: float, past_tokens: int, prefill_s: float, new_tokens: int, bytes_per_s: float
) -> int:
    """Return S_buf: bytes to read before a prefill begins, so that none of its layers waits for its
    KV (section 3.2.1).

    B(T_load L_hist - T_pref L_new), rounded up; 0 where loading hides behind the prefill anyway.

    Args:
        load_s: T_load, seconds to load a token.
        past_tokens: L_hist, tokens to load.
        prefill_s: T_pref, seconds to prefill a token.
        new_tokens: L_new, tokens to prefill.
        bytes_per_s: B, bytes loaded per second.
    """
    return max(0, -int(-bytes_per_s * (load_s * past_tokens - prefill_s * new_tokens) // 1))


def layers_before(plan: LoadPlan, n_layers: int) -> int:
    """Return how many layers of a plan to read before its prefill begins: those of `read_buffer`,
    rounded up.

    0 where this machine was not measured, or loading hides behind the prefill anyway.
    """
    forecast, nbytes = plan.forecast, sum(fetch.nbytes for fetch in plan.fetches)
    past_tokens = sum(fetch.n_tokens for fetch in plan.fetches)
    new_tokens = max(1, len(plan.prompt) - past_tokens)
    if forecast is None or forecast.load_s <= 0 or not nbytes or not past_tokens:
        return 0
    bytes_per_s = nbytes / forecast.load_s
    token_load_s, token_prefill_s = forecast.load_s / past_tokens, forecast.recompute_s / new_tokens
    buffer_bytes = read_buffer(token_load_s, past_tokens, token_prefill_s, new_tokens, bytes_per_s)
    return min(n_layers, -(-buffer_bytes * n_layers // nbytes))
