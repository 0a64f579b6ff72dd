"""How many layers are read at a time: few at first, so that fusing starts early, then more, so that reads stay few.

Arithmetic only: `load.layers` reads in these steps, `plan.estimate` predicts with them.
"""

from __future__ import annotations

from itertools import accumulate

AHEAD = 4
"""Most layers that may wait between reading and fusing; always at least those of one read."""
STEP_NBYTES = 4 << 20
"""Most bytes of a chunk per read; always at least one layer."""


def layers_a_read(nbytes: int, n_layers: int) -> int:
    """Return the most layers per read, where the largest chunk has `nbytes`."""
    return max(1, min(n_layers, STEP_NBYTES * n_layers // max(1, nbytes)))


def steps(n_layers: int, max_layers: int) -> list[int]:
    """Return the layers of each read: 1, 2, 4, ... up to `max_layers`, then that many each, and at last the rest.

    Nothing hides the first read (CacheBlend 5.1); each later one overlaps fusing the layers of the one before it.
    """
    sizes, n_left, size = list[int](), n_layers, 1
    while n_left > 0:
        sizes.append(min(size, max_layers, n_left))
        n_left, size = n_left - sizes[-1], 2 * size
    return sizes


def spans(sizes: list[int]) -> list[tuple[int, int]]:
    """Return the first layer of each read, and the one after its last."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def room(max_layers: int) -> int:
    """Return how many reads of `max_layers` layers may wait to be fused."""
    return max(1, AHEAD // max_layers)


def room_for(layers: int, n_layers: int, max_layers: int) -> int:
    """Return the same where `layers` are to be read before the first is fused; the reading thread holds one more."""
    n_begun = sum(first < layers for first, _ in spans(steps(n_layers, max_layers)))
    return max(room(max_layers), n_begun - 1)
