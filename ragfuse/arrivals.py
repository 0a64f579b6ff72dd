"""What came over a line for one prompt, piece by piece: values for its trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PieceTrace:
    """Layers of one piece: of which segments, and how they came: at a codec level, or as "text", which is computed.

    layers: the first, and the one behind the last. began_s: seconds since the deadline began to run; seconds: until it
    was there, nbytes of it. throughput: bytes a second of the whole line meanwhile, None where nothing was read;
    sharing: streams on it. why: in words, where not all of it came.
    """

    segments: tuple[int, ...]
    tokens: int
    level: str
    layers: tuple[int, int] = (0, 0)
    nbytes: int = 0
    began_s: float = 0.0
    seconds: float = 0.0
    throughput: float | None = None
    sharing: int = 1
    why: str = ""


@dataclass(frozen=True)
class StreamTrace:
    """All pieces, in the order in which they were decided. held: whether the first token came within the deadline.

    adapt: as in the settings. prior: bytes a second that the line was taken to carry at first, None: nothing was known.
    """

    adapt: str
    deadline_s: float
    held: bool
    pieces: tuple[PieceTrace, ...]
    prior: float | None = None
