"""The state of a stream's current piece, and of the layers that are being read for it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ragfuse.plan.adapt import StreamPiece
from ragfuse.store import EncodedLayers


@dataclass
class PendingRead:
    """A read of some layers of a piece that is under way. Times are those of the stream's clock, in seconds.

    Args:
        segments: Segments to read.
        span: The first layer, and the one after the last.
        level: Codec level to read.
        requested: When the read was requested.
        received: What has arrived so far, by segment.
        done: Set when the read has ended.
        stop: Set to end the read after the current segment.
        began: When it got its turn on the link; None while it waits for it.
        ended: When the read ended.
    """

    segments: tuple[int, ...]
    span: tuple[int, int]
    level: str
    requested: float
    received: dict[int, EncodedLayers] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    began: float | None = None
    ended: float | None = None


@dataclass
class CurrentPiece:
    """The piece that is being streamed.

    Args:
        piece: The piece.
        wanted: Its segments that are still to be streamed, not computed.
        at: The first of the layers that come next.
        end: The layer after the last of these.
        missing: Segments whose layers at:end are missing.
        failed_levels: Levels at which reading layers at:end has failed.
        reading: The read of layers at:end that is under way, if any.
        is_aside: Whether the piece is set aside: that read goes on while other pieces are streamed.
        was_aside: Whether the piece was set aside before its latest layers came.
    """

    piece: StreamPiece
    wanted: list[int]
    at: int = 0
    end: int = 0
    missing: list[int] = field(default_factory=list)
    failed_levels: set[str] = field(default_factory=set)
    reading: PendingRead | None = None
    is_aside: bool = False
    was_aside: bool = False
