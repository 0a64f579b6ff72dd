"""The choice of the codec level of a new chunk. Decisions only."""

from __future__ import annotations

from ragfuse.plan.cost import CostModel
from ragfuse.types.levels import LEVEL_NAMES


def choose_level(n_tokens: int, nbytes: int, costs: CostModel, tier: str, ratio: float) -> str:
    """Return the least lossy level for a new chunk at which loading from a tier hides behind
    recomputing.

    Where no level hides, the one that loads fastest; in a tier that was not measured, raw. `nbytes`
    is the chunk's size as raw.
    """
    hidden_s = costs.recompute_s(ratio, n_tokens)
    if tier not in costs.tiers:
        return LEVEL_NAMES[0]
    known = [
        level
        for level in LEVEL_NAMES
        if costs.knows_level(level) and (level in costs.packed or level == LEVEL_NAMES[0])
    ]
    load_s = {level: costs.stored_s(tier, level, nbytes, n_tokens) for level in known}
    hidden = (level for level, seconds in load_s.items() if seconds <= hidden_s)
    return next(hidden, min(load_s, key=lambda level: load_s[level]))
