"""Cutting an upload to Redis into pieces small enough that each is answered well within the timeout.

A client waits for the answer to a whole command, however large it is, so a large layer over a slow link would time
out. The size of a piece follows the speed measured so far. This file does no I/O and reads no clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MIN_PIECE_NBYTES = 1 << 18
"""Bytes of a piece at the start and after a failure; never fewer."""
_MAX_PIECE_NBYTES = 64 << 20
"""Most bytes of a piece: as many as the server's buffer for one client takes without trouble."""


class Rest(NamedTuple):
    """The part of a field that is still to be sent.

    Args:
        name: Name of the field.
        value: The bytes left.
        pieces: Number of pieces of the field that were sent already.
    """

    name: str
    value: memoryview
    pieces: int = 0


class Pace:
    """The number of bytes to send at once: doubled while sending is fast, halved when it is slow.

    Args:
        timeout_s: Seconds after which a command times out.

    Attributes:
        nbytes: Bytes to send next.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self.nbytes = timeout_s, MIN_PIECE_NBYTES

    def took(self, nbytes: int, seconds: float) -> None:
        """Adapt to the time that sending `nbytes`, and waiting for the answer, took."""
        if seconds > self._timeout_s / 2:
            self.nbytes = max(MIN_PIECE_NBYTES, self.nbytes // 2)
        elif seconds < self._timeout_s / 8 and 2 * nbytes > self.nbytes:
            self.nbytes = min(_MAX_PIECE_NBYTES, 2 * self.nbytes)

    def failed(self) -> None:
        """Return to the smallest size after a request without an answer."""
        self.nbytes = MIN_PIECE_NBYTES


def next_batch(unsent: deque[Rest], nbytes: int) -> tuple[list[tuple[str, memoryview]], list[Rest]]:
    """Take about the next `nbytes` to send from the front of the queue `unsent`.

    A field is cut only if it is larger than `nbytes`; the pieces of field 7 are named 7+0, 7+1, ...

    Returns:
        (name, bytes) of fields and pieces to send, and the fields whose last piece is among these: the server must
        join their pieces afterwards.
    """
    batch: list[tuple[str, memoryview]] = []
    to_join: list[Rest] = []
    while unsent and nbytes > 0:
        name, value, pieces = unsent[0]
        if not pieces and batch and value.nbytes > nbytes:
            break
        unsent.popleft()
        if not pieces and value.nbytes <= nbytes:
            batch.append((name, value))
        else:
            batch.append((f"{name}+{pieces}", value[:nbytes]))
            rest = Rest(name, value[nbytes:], pieces + 1)
            unsent.appendleft(rest) if rest.value else to_join.append(rest)
        nbytes -= batch[-1][1].nbytes
    return batch, to_join
