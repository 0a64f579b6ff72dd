"""Window sizes, free buffers and capacities of AttentionStore (3.3, 4.3.5), which simulations are
sized by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ragfuse.plan.evict import EvictionItem


def by_arrival(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Rank items by arrival: first in, first out, whatever their use. Tiers do not record it, only
    simulations do.
    """
    return 0, item.arrived


def prefetch_window(memory_bytes: int, kv_bytes: float) -> int:
    """Return L_pw, how many waiting jobs' KV fits in memory: C_mem / S_kv, rounded down (section
    3.3.1).

    Args:
        memory_bytes: C_mem.
        kv_bytes: S_kv, the average bytes of a conversation; less than 1 counts as 1.
    """
    return int(memory_bytes // max(kv_bytes, 1))


def eviction_window(memory_bytes: int, disk_bytes: int, kv_bytes: float) -> int:
    """Return how many waiting jobs' KV fits in all tiers: (C_mem + C_disk) / S_kv, rounded down
    (section 3.3.2).
    """
    return prefetch_window(memory_bytes + disk_bytes, kv_bytes)


def buffer_excess(used_bytes: int, capacity_bytes: int, free_share: float) -> int:
    """Return the bytes to evict so that `free_share` of a tier is free for what is fetched next
    (section 3.3.1).
    """
    return max(0, used_bytes - int(capacity_bytes * (1 - free_share)))


def taken_until(found: Iterable[EvictionItem], excess_bytes: int) -> Iterator[EvictionItem]:
    """Yield the first items until their bytes reach `excess_bytes`; all of them where they have
    fewer.

    `found` is advanced no further than that, because its items may be dropped as they are yielded.
    """
    remaining = iter(found)
    while excess_bytes > 0 and (item := next(remaining, None)) is not None:
        excess_bytes -= item.nbytes
        yield item


def cache_capacity(sessions_per_ttl: float, window_tokens: int, token_bytes: float) -> float:
    """Return CCpUT: bytes that hold every conversation of one TTL period at full length (section
    4.3.5).

    DSpUT (distinct conversations in that time) times CCpS (the context window times a token's KV
    bytes).
    """
    return sessions_per_ttl * window_tokens * token_bytes


def required_capacity(
    ratio: float, sessions_per_ttl: float, window_tokens: int, token_bytes: float
) -> int:
    """Return RCC, the bytes for a ratio RCC/CCpUT, rounded up; the paper's best hit rate is at 0.25
    (figure 23).
    """
    return -int(-ratio * cache_capacity(sessions_per_ttl, window_tokens, token_bytes) // 1)
