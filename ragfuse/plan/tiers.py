"""Which tier a chunk should lie in: when it is new, and once it is hit often. Decisions only, nothing is moved here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from ragfuse.core import ChunkKey, Entry
from ragfuse.plan.estimate import Estimate
from ragfuse.profiles import MachineProfile

OFTEN = 3
"""Hits from which on a chunk deserves a faster tier."""


def store_cost(nbytes: int, price: float, months: float = 1.0) -> float:
    """C_store of CacheBlend 5.1: what keeping so many bytes costs, by the price of a gigabyte (10^9) for a month."""
    return nbytes / 1e9 * price * months


def price_of(tier: str, prices: Mapping[str, float]) -> float:
    """The price of a tier by its name, else by its kind, which its name begins with; none is dearer than any."""
    kinds = (kind for kind in prices if tier.startswith(kind))
    return prices[tier] if tier in prices else min((prices[kind] for kind in kinds), default=inf)


def choose_tier(
    n_tokens: int, nbytes: int, machine: MachineProfile, tiers: Sequence[str], prices: Mapping[str, float], ratio: float
) -> str | None:
    """The cheapest tier for a new chunk whose loading hides behind recomputing `ratio` of it, else the fastest.

    CacheBlend 5.1: T_recompute(r*, L) >= T_load(L, tier). Equal prices: the faster one. None if no tier was measured.
    """
    times = Estimate(machine)
    load_s = {tier: times.load_s(tier, nbytes) for tier in tiers if tier in machine.tiers}
    hidden = [tier for tier, seconds in load_s.items() if seconds <= times.recompute_s(ratio, n_tokens)]
    if not hidden:
        return min(load_s, key=lambda tier: load_s[tier], default=None)
    return min(hidden, key=lambda tier: (store_cost(nbytes, price_of(tier, prices)), load_s[tier]))


def promotions(
    entries: Iterable[Entry], machine: MachineProfile, room: Mapping[str, int], often: int = OFTEN
) -> Iterator[tuple[ChunkKey, str]]:
    """Chunks hit `often` or more and the faster tier that each should come to; those that cost most loading first.

    room: free bytes of the tiers that may take some; what is promoted is counted against it. A chunk goes where it
    loads soonest, if that is sooner than from the fastest tier that has it.
    """
    times, free = Estimate(machine), {tier: nbytes for tier, nbytes in room.items() if tier in machine.tiers}
    copies: dict[ChunkKey, list[Entry]] = {}
    for entry in (entry for entry in entries if entry.tier in machine.tiers):
        copies.setdefault(entry.key, []).append(entry)
    hot = []
    for key, kept in copies.items():
        hits, load_s = max(e.hits for e in kept), min(times.load_s(e.tier, e.nbytes) for e in kept)
        if hits >= often:
            hot.append((hits * load_s, load_s, kept[0].nbytes, key))
    for _, load_s, nbytes, key in sorted(hot, key=lambda each: each[0], reverse=True):
        there = {tier: times.load_s(tier, nbytes) for tier in free if nbytes <= free[tier]}
        tier = min(there, key=lambda name: there[name], default=None)
        if tier is not None and there[tier] < load_s:
            free[tier] -= nbytes
            yield key, tier
