"""The choice of codec level and tier for each segment that is stored at several. Decisions only.

The least lossy level is read while its loading hides behind computing. Where the first token waits for loading,
segments change to lossier and faster levels, those that save most time first, until it comes about as early as it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ragfuse.plan.estimate import Estimate
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry
from ragfuse.types.levels import loss
from ragfuse.types.plan import Fetch

ReadOptions = Mapping[int, Sequence[Fetch]]
"""By segment: all ways to read it, the least lossy first, and the fastest first at equal loss."""
MIN_GAIN = 0.1
"""A lossier level must bring the first token earlier by more than this share to be worth it."""
LEVEL_STEPS = 8
"""Least number of steps in which all segments change from one level to the next."""


def read_options(
    estimate: Estimate,
    fetches: Iterable[Fetch],
    entries: Mapping[ChunkKey, Entry],
    others: Mapping[ChunkKey, list[Entry]],
) -> ReadOptions:
    """Return all measured ways to read these segments.

    Args:
        estimate: The estimate for this machine.
        fetches: The segments, each with the way that was found first, which was measured.
        entries: The entries that were found first, by key.
        others: Entries of the same keys in further tiers.
    """
    found = {}
    for fetch in fetches:
        ways = [
            Fetch(fetch.segment, entry.key, entry.tier, level, nbytes, entry.n_tokens, tuple(entry.sizes.items()))
            for entry in (entries[fetch.key], *others.get(fetch.key, ()))
            for level, nbytes in entry.sizes.items()
            if entry.n_tokens == fetch.n_tokens
        ]
        known = (way for way in ways if estimate.knows([way]))
        found[fetch.segment] = sorted(known, key=lambda way: (loss(way.level), estimate.fetch_s(way)))
    return found


def fastest(estimate: Estimate, options: ReadOptions) -> dict[int, Fetch]:
    """Return the fastest way to read each segment; at equal times, the least lossy."""
    return {at: min(ways, key=estimate.fetch_s) for at, ways in options.items()}


def lossier(estimate: Estimate, options: ReadOptions, chosen: Mapping[int, Fetch]) -> dict[int, Fetch] | None:
    """Return `chosen` with some segments changed to a lossier and faster level; None where there is none.

    The segments that save most time change, one in `LEVEL_STEPS`.
    """
    gains = dict[int, tuple[float, Fetch]]()
    for at, current in chosen.items():
        current_s = estimate.fetch_s(current)
        for way in options[at][options[at].index(current) + 1 :]:
            if (saved_s := current_s - estimate.fetch_s(way)) > 0:
                gains[at] = saved_s, way
                break
    best = sorted(gains, key=lambda at: -gains[at][0])[: -(-len(chosen) // LEVEL_STEPS)]
    return {**chosen, **{at: gains[at][1] for at in best}} if best else None
