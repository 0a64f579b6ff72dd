"""How many layers are read at a time: few at first, so that fusing begins soon, then more, so that reads stay few.

Arithmetic only: `load.layers` reads by it, `plan.estimate` foretells by it.
"""

from __future__ import annotations

from itertools import accumulate

AHEAD = 4
"""Layers that may wait, read but not yet fused, or one read's if those are more."""
STEP_NBYTES = 4 << 20
"""A read takes at most as many layers of a chunk as fit, at least one."""


def layers_a_read(nbytes: int, n_layers: int) -> int:
    """The most layers that are read together where the largest chunk has so many bytes."""
    return max(1, min(n_layers, STEP_NBYTES * n_layers // max(1, nbytes)))


def steps(n_layers: int, most: int) -> list[int]:
    """Layers of each read in turn: 1, 2, 4, ... while that is below `most`, then `most`, and at the end what is left.

    The first read is what nothing can hide (CacheBlend 5.1); each later one hides behind fusing the one before it.
    """
    sizes, left, size = list[int](), n_layers, 1
    while left > 0:
        sizes.append(min(size, most, left))
        left, size = left - sizes[-1], 2 * size
    return sizes


def spans(sizes: list[int]) -> list[tuple[int, int]]:
    """The first layer of each read, and the one behind its last."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def room(most: int) -> int:
    """Reads that may wait to be fused."""
    return max(1, AHEAD // most)


def room_for(layers: int, n_layers: int, most: int) -> int:
    """The same where so many layers are to be at hand before the first is fused: one read is in the reader's hands."""
    begun = sum(first < layers for first, _ in spans(steps(n_layers, most)))
    return max(room(most), begun - 1)
