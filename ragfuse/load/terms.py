"""The terms of a stream (deadline, strategy, level), and the words in which its trace explains each piece."""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse.plan.adapt import PIECE_TOKENS, Adapt

DEADLINE_MARGIN = 0.05
"""Share of the deadline kept in reserve, as computing may take a little longer than predicted."""

COMPUTED_IN_TIME = "computed, which meets the deadline"
COMPUTED_FASTER = "computed, as reading it would take longer"
SET_ASIDE = "set aside, as its bytes come too slowly: others are read first"
GIVEN_UP = "given up, as its bytes came too slowly"
BYTES_UNREADABLE = "its bytes could not be read"
NOT_WAITED_FOR = "not waited for, as the deadline is near: what was read before is used"
LEVEL_NOT_KEPT = "computed, as it is not stored at the level that was asked for"


@dataclass(frozen=True)
class Terms:
    """The terms of a stream.

    Args:
        began_s: `clock()` when the deadline began to run.
        deadline_s: Seconds from then to the first token.
        base_s: Seconds that the prompt computes in any case after the last piece.
        adapt: How levels are chosen (see `plan.adapt.Adapt`).
        piece_tokens: Tokens of a piece, about.
        prior: Assumed throughput of the link before anything was read, in bytes per second; None: unknown.
        level: One codec level for all pieces, whatever the deadline; None: as the deadline allows.
    """

    began_s: float
    deadline_s: float
    base_s: float = 0.0
    adapt: Adapt = "paper"
    piece_tokens: int = PIECE_TOKENS
    prior: float | None = None
    level: str | None = None
