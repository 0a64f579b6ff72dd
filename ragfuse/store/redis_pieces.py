"""How an upload to Redis is cut into pieces that are answered one by one, so that only silence can be too long.

A client waits for a whole command to be taken and then for its answer, however large it is. Pieces are therefore as
large as they are seen to pass in a fraction of the patience. Values only: no I/O and no clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

LEAST_NBYTES = 1 << 18
_MOST_NBYTES = 64 << 20
"""What the server's buffer for one client takes without question."""


class Rest(NamedTuple):
    """What is still to be brought of a field, of which so many pieces are there."""

    name: str
    value: memoryview
    pieces: int = 0


class Pace:
    """How many bytes to bring at once: more while that is quick, fewer where it is slow, few after trouble."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s, self.nbytes = patience_s, LEAST_NBYTES

    def took(self, nbytes: int, seconds: float) -> None:
        """So many bytes were brought and answered in so long."""
        if seconds > self._patience_s / 2:
            self.nbytes = max(LEAST_NBYTES, self.nbytes // 2)
        elif seconds < self._patience_s / 8 and 2 * nbytes > self.nbytes:
            self.nbytes = min(_MOST_NBYTES, 2 * self.nbytes)

    def failed(self) -> None:
        """Nothing was answered."""
        self.nbytes = LEAST_NBYTES


def take(left: deque[Rest], nbytes: int) -> tuple[list[tuple[str, memoryview]], list[Rest]]:
    """About the next `nbytes`: (field, bytes) of whole fields or of pieces, and the fields whose last piece is there.

    A field is cut only where it is larger than that; its pieces are called 7+0, 7+1, ...
    """
    batch: list[tuple[str, memoryview]] = []
    to_join: list[Rest] = []
    while left and nbytes > 0:
        name, value, pieces = left[0]
        if not pieces and batch and value.nbytes > nbytes:
            break
        left.popleft()
        if not pieces and value.nbytes <= nbytes:
            batch.append((name, value))
        else:
            batch.append((f"{name}+{pieces}", value[:nbytes]))
            rest = Rest(name, value[nbytes:], pieces + 1)
            left.appendleft(rest) if rest.value else to_join.append(rest)
        nbytes -= batch[-1][1].nbytes
    return batch, to_join
