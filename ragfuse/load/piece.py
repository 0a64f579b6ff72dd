"""What a stream has at hand: a piece, and layers of it that are on their way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ragfuse.plan.adapt import StreamPiece
from ragfuse.store import EncodedLayers


@dataclass
class PendingRead:
    """Layers on their way: what has come so far, by segment. `stop` lets it end with the segment at hand.

    asked: `clock()` when it was asked for; began: when it had its turn on the line, None: it still waits for that;
    ended: when all was there.
    """

    segments: tuple[int, ...]
    span: tuple[int, int]
    level: str
    asked: float
    came: dict[int, EncodedLayers] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    began: float | None = None
    ended: float | None = None


@dataclass
class CurrentPiece:
    """The piece at hand: segments that are still wanted, and its next layers, at:end.

    For these layers alone: segments that lack them, levels that were tried in vain, and how they are being read.
    is_aside: they are, while other pieces come; stood: so it was with the step that came last.
    """

    piece: StreamPiece
    wanted: list[int]
    at: int = 0
    end: int = 0
    lacking: list[int] = field(default_factory=list)
    banned: set[str] = field(default_factory=set)
    reading: PendingRead | None = None
    is_aside: bool = False
    stood: bool = False
