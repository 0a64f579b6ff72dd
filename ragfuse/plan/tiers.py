"""Which tier a chunk should lie in: when it is new, and once it is hit often. Decisions only, nothing is moved here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType

from ragfuse.plan.estimate import Estimate
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.profiles import MachineProfile

RAW_ALONE: Mapping[str, Sequence[str]] = MappingProxyType({})
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
    n_tokens: int,
    nbytes: int,
    machine: MachineProfile,
    tiers: Sequence[str],
    prices: Mapping[str, float],
    ratio: float,
    written: Mapping[str, Sequence[str]] = RAW_ALONE,
) -> str | None:
    """The cheapest tier for a new chunk whose loading hides behind recomputing `ratio` of it, else the fastest.

    CacheBlend 5.1: T_recompute(r*, L) >= T_load(L, tier). Equal prices: the faster one. None if no tier was measured.
    nbytes: of the chunk as raw. written: the levels that tiers are written in, raw unless said; of several the one that
    loads soonest counts, and all are paid for.
    """
    times, load_s, cost = Estimate(machine), dict[str, float](), dict[str, float]()
    for tier in tiers:
        levels = [level for level in written.get(tier, LEVEL_NAMES[:1]) if times.knows_level(level)]
        if tier in machine.tiers and levels:
            load_s[tier] = min(times.kept_s(tier, level, nbytes, n_tokens) for level in levels)
            kept = sum(nbytes * machine.packed.get(level, 1.0) for level in levels)
            cost[tier] = store_cost(round(kept), price_of(tier, prices))
    hidden = [tier for tier, seconds in load_s.items() if seconds <= times.recompute_s(ratio, n_tokens)]
    if not hidden:
        return min(load_s, key=lambda tier: load_s[tier], default=None)
    return min(hidden, key=lambda tier: (cost[tier], load_s[tier]))


def choose_level(n_tokens: int, nbytes: int, machine: MachineProfile, tier: str, ratio: float) -> str:
    """The level for a new chunk in a tier that loses least among those whose loading hides behind recomputing.

    Where none hides, the one that loads soonest. Raw in a tier that was not measured. nbytes: of the chunk as raw.
    """
    times, hidden_s = Estimate(machine), Estimate(machine).recompute_s(ratio, n_tokens)
    if tier not in machine.tiers:
        return LEVEL_NAMES[0]
    known = [
        level
        for level in LEVEL_NAMES
        if times.knows_level(level) and (level in machine.packed or level == LEVEL_NAMES[0])
    ]
    load_s = {level: times.kept_s(tier, level, nbytes, n_tokens) for level in known}
    hidden = (level for level, seconds in load_s.items() if seconds <= hidden_s)
    return next(hidden, min(load_s, key=lambda level: load_s[level]))


def promotions(
    entries: Iterable[Entry], machine: MachineProfile, room: Mapping[str, int], often: int = OFTEN
) -> Iterator[tuple[ChunkKey, str]]:
    """Chunks hit `often` or more and the faster tier that each should come to; those that cost most loading first.

    room: free bytes of the tiers that keep chunks, in the order in which they are asked; what is promoted is counted
    against it. A chunk is read from the first that has it, so it goes to one before that, where it loads soonest and is
    loaded sooner. Its entries in all tiers, also in others such as memory, count their hits together.
    """
    free, copies = dict(room), dict[ChunkKey, list[Entry]]()
    for entry in entries:
        copies.setdefault(entry.key, []).append(entry)
    moves = [move for kept in copies.values() if (move := _gain(kept, machine, list(room), often)) is not None]
    for _, entry, load_s in sorted(moves, key=lambda move: move[0], reverse=True):
        fits = [tier for tier in load_s if entry.nbytes <= free[tier]]
        if fits:
            tier = min(fits, key=lambda name: load_s[name])
            free[tier] -= entry.nbytes
            yield entry.key, tier


def _gain(
    kept: Sequence[Entry], machine: MachineProfile, order: Sequence[str], often: int
) -> tuple[float, Entry, dict[str, float]] | None:
    """What a chunk's hits cost, the entry that they read, and seconds from each tier that loads it sooner; or None."""
    times, hits = Estimate(machine), sum(entry.hits for entry in kept)
    entry = min((e for e in kept if e.tier in order), key=lambda e: order.index(e.tier), default=None)
    if entry is None or entry.tier not in machine.tiers or hits < often:
        return None
    if not all(map(times.knows_level, entry.sizes)):
        return None
    now_s = _entry_s(times, entry, entry.tier)
    before = [tier for tier in order[: order.index(entry.tier)] if tier in machine.tiers]
    load_s = {tier: seconds for tier in before if (seconds := _entry_s(times, entry, tier)) < now_s}
    return (hits * now_s, entry, load_s) if load_s else None


def _entry_s(times: Estimate, entry: Entry, tier: str) -> float:
    """An entry's best level from a tier that it lies in, or might."""
    level, nbytes = next(iter(entry.sizes.items()))
    return times.load_s(tier, nbytes) + times.decode_s(level, entry.n_tokens)
