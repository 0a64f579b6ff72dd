"""What a queue of waiting jobs says of the future: how far to look, what to fetch, how much to clear away.

AttentionStore, section 3.3: jobs are known before they run, so that what they will read can be brought to memory, and
what none of them reads can go. Decisions only: the queue is told as names of conversations, the first first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from itertools import islice

from ragfuse.plan.eviction_item import EvictionItem
from ragfuse.types.plan import LoadPlan


def prefetch_window(memory_bytes: int, kv_bytes: float) -> int:
    """L_pw: how many waiting jobs' KV memory has room for; C_mem / S_kv, rounded down (section 3.3.1).

    kv_bytes: S_kv, of a conversation on average. 0 bytes of it: as many as there are bytes.
    """
    return int(memory_bytes // max(kv_bytes, 1))


def eviction_window(memory_bytes: int, disk_bytes: int, kv_bytes: float) -> int:
    """How many waiting jobs' KV all tiers together have room for: (C_mem + C_disk) / S_kv, down (section 3.3.2)."""
    return prefetch_window(memory_bytes + disk_bytes, kv_bytes)


def places(waiting: Iterable[Hashable], window: int | None = None) -> dict[Hashable, float]:
    """Where each conversation's first job waits, of the first `window` jobs; None: of all. Jobs of none are counted."""
    found: dict[Hashable, float] = {}
    for place, name in enumerate(islice(waiting, window)):
        if name is not None:
            found.setdefault(name, float(place))
    return found


def exempt(item: EvictionItem, waiting: Mapping[Hashable, float]) -> bool:
    """Whether one of these jobs will read it, so that it goes only where all that is kept is so (section 3.3.2)."""
    return item.name in waiting


def to_prefetch(
    waiting: Iterable[Hashable],
    nbytes: Callable[[Hashable], int | None],
    in_memory: Container[Hashable],
    memory_bytes: int,
) -> Iterator[Hashable]:
    """Conversations to bring to memory, in queue order, as long as all that waits before them fits there, too.

    Section 3.3.1, by bytes where the paper counts conversations of average size. nbytes: of what is kept of one,
    wherever it is; None: nothing. It ends at the first that does not fit: what comes later has no right to its room.
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
    """S_buf: bytes to read before a prefill begins, so that none of its layers waits for its KV (section 3.2.1).

    B(T_load L_hist - T_pref L_new), rounded up; 0 where loading hides behind prefilling anyway. load_s, prefill_s: of a
    token.
    """
    return max(0, -int(-bytes_per_s * (load_s * past_tokens - prefill_s * new_tokens) // 1))


def layers_before(plan: LoadPlan, n_layers: int) -> int:
    """How many layers of a plan to read before its prefill begins: as many as `read_buffer` has room for, rounded up.

    0 where this machine was not measured, or loading hides anyway.
    """
    foreseen, nbytes = plan.forecast, sum(fetch.nbytes for fetch in plan.fetches)
    past = sum(fetch.n_tokens for fetch in plan.fetches)
    new = max(1, len(plan.prompt) - past)
    if foreseen is None or foreseen.load_s <= 0 or not nbytes or not past:
        return 0
    bytes_per_s = nbytes / foreseen.load_s
    held = read_buffer(foreseen.load_s / past, past, foreseen.recompute_s / new, new, bytes_per_s)
    return min(n_layers, -(-held * n_layers // nbytes))


def buffer_excess(used_bytes: int, capacity_bytes: int, free_share: float) -> int:
    """Bytes to clear away so that this share of a tier is free: its buffer for what is fetched next (section 3.3.1)."""
    return max(0, used_bytes - int(capacity_bytes * (1 - free_share)))


def taken_until(found: Iterable[EvictionItem], excess_bytes: int) -> Iterator[EvictionItem]:
    """The first of these that have as many bytes together as the excess; all of them where they have fewer.

    No further one is asked for: who asks may be dropping them.
    """
    left = iter(found)
    while excess_bytes > 0 and (item := next(left, None)) is not None:
        excess_bytes -= item.nbytes
        yield item


def cache_capacity(sessions_per_ttl: float, window_tokens: int, token_bytes: float) -> float:
    """CCpUT: bytes that keep every conversation of a time `ttl_s` at its longest (section 4.3.5).

    DSpUT (distinct conversations in that time) times CCpS (the context window times a token's KV bytes).
    """
    return sessions_per_ttl * window_tokens * token_bytes


def required_capacity(ratio: float, sessions_per_ttl: float, window_tokens: int, token_bytes: float) -> int:
    """RCC: bytes to plan for at this RCC/CCpUT, rounded up; the paper reaches its best hit rate at 0.25 (figure 23)."""
    return -int(-ratio * cache_capacity(sessions_per_ttl, window_tokens, token_bytes) // 1)
