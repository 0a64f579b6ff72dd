"""Look-ahead decisions from the queue of waiting jobs: window sizes, prefetching and buffers (AttentionStore 3.3).

Jobs are known before they run, so that KV they will read can be prefetched, and KV that none of them reads can be
evicted. Decisions only: the queue is an argument, as names of conversations from head to tail.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from itertools import islice

from ragfuse.plan.eviction_item import EvictionItem
from ragfuse.types.plan import LoadPlan


def prefetch_window(memory_bytes: int, kv_bytes: float) -> int:
    """Return L_pw, how many waiting jobs' KV fits in memory: C_mem / S_kv, rounded down (section 3.3.1).

    Args:
        memory_bytes: C_mem.
        kv_bytes: S_kv, the average bytes of a conversation; less than 1 counts as 1.
    """
    return int(memory_bytes // max(kv_bytes, 1))


def eviction_window(memory_bytes: int, disk_bytes: int, kv_bytes: float) -> int:
    """Return how many waiting jobs' KV fits in all tiers: (C_mem + C_disk) / S_kv, rounded down (section 3.3.2)."""
    return prefetch_window(memory_bytes + disk_bytes, kv_bytes)


def places(waiting: Iterable[Hashable], window: int | None = None) -> dict[Hashable, float]:
    """Return the queue position of each conversation's first job among the first `window` jobs (None: among all).

    Jobs without a conversation (None) count as positions.
    """
    found: dict[Hashable, float] = {}
    for place, name in enumerate(islice(waiting, window)):
        if name is not None:
            found.setdefault(name, float(place))
    return found


def exempt(item: EvictionItem, waiting: Mapping[Hashable, float]) -> bool:
    """Return whether a waiting job will read the item, which exempts it from eviction while others remain (section
    3.3.2)."""
    return item.name in waiting


def to_prefetch(
    waiting: Iterable[Hashable],
    nbytes: Callable[[Hashable], int | None],
    in_memory: Container[Hashable],
    memory_bytes: int,
) -> Iterator[Hashable]:
    """Yield conversations to prefetch, in queue order, while they fit in memory with all those before them.

    Section 3.3.1, by bytes where the paper counts conversations of average size. It ends at the first that does not
    fit, so that later ones do not take its room.

    Args:
        waiting: Conversations of the waiting jobs, from head to tail.
        nbytes: Gives the stored bytes of a conversation in all tiers; None for none.
        in_memory: Conversations that are in memory already.
        memory_bytes: Bytes of memory for them.
    """
    seen: set[Hashable] = set()
    for name in waiting:
        size = None if name is None or name in seen else nbytes(name)
        if size is None:
            continue
        seen.add(name)
        memory_bytes -= size
        if memory_bytes < 0:
            return
        if name not in in_memory:
            yield name


def read_buffer(load_s: float, past_tokens: int, prefill_s: float, new_tokens: int, bytes_per_s: float) -> int:
    """Return S_buf: bytes to read before a prefill begins, so that none of its layers waits for its KV (section 3.2.1).

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
    """Return how many layers of a plan to read before its prefill begins: those of `read_buffer`, rounded up.

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


def buffer_excess(used_bytes: int, capacity_bytes: int, free_share: float) -> int:
    """Return the bytes to evict so that `free_share` of a tier is free for what is fetched next (section 3.3.1)."""
    return max(0, used_bytes - int(capacity_bytes * (1 - free_share)))


def taken_until(found: Iterable[EvictionItem], excess_bytes: int) -> Iterator[EvictionItem]:
    """Yield the first items until their bytes reach `excess_bytes`; all of them where they have fewer.

    `found` is advanced no further than that, because its items may be dropped as they are yielded.
    """
    remaining = iter(found)
    while excess_bytes > 0 and (item := next(remaining, None)) is not None:
        excess_bytes -= item.nbytes
        yield item


def cache_capacity(sessions_per_ttl: float, window_tokens: int, token_bytes: float) -> float:
    """Return CCpUT: bytes that hold every conversation of one TTL period at full length (section 4.3.5).

    DSpUT (distinct conversations in that time) times CCpS (the context window times a token's KV bytes).
    """
    return sessions_per_ttl * window_tokens * token_bytes


def required_capacity(ratio: float, sessions_per_ttl: float, window_tokens: int, token_bytes: float) -> int:
    """Return RCC, the bytes for a ratio RCC/CCpUT, rounded up; the paper's best hit rate is at 0.25 (figure 23)."""
    return -int(-ratio * cache_capacity(sessions_per_ttl, window_tokens, token_bytes) // 1)
