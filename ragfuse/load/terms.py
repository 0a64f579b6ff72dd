"""What a stream is to keep, and in which words it says what became of a piece."""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse.plan.adapt import PIECE_TOKENS, Adapt

DEADLINE_MARGIN = 0.05
"""Share of a deadline that is not planned away: computing takes now a little more, now a little less than foreseen."""

COMPUTED_IN_TIME = "computed, as that is in time"
COMPUTED_SOONER = "computed, as its bytes would come later"
SET_ASIDE = "set aside, as its bytes come too slowly: others first"
GIVEN_UP = "given up, as its bytes came too slowly"
BYTES_UNREADABLE = "its bytes could not be read"
NOT_WAITED_FOR = "not waited for, as the deadline comes: what came before is used"
LEVEL_NOT_KEPT = "computed, as it is not kept at the level that is asked for"


@dataclass(frozen=True)
class Terms:
    """What a stream is to keep. began_s: `clock()` when the deadline began to run; deadline_s: seconds from then.

    base_s: seconds that the prompt computes in any case, behind the last piece. prior: bytes a second that the line is
    taken to carry before anything was read over it, None: not known.
    """

    began_s: float
    deadline_s: float
    base_s: float = 0.0
    adapt: Adapt = "paper"
    piece_tokens: int = PIECE_TOKENS
    prior: float | None = None
    level: str | None = None
    """All pieces at this level, whatever the deadline; None: as it allows."""
