"""How long a plan will take, as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Bound = Literal["floor", "loading", "deadline", "asked"]
"""What the ratio stopped at: the least that is safe, what loading hides, a deadline, or what was asked for."""


@dataclass(frozen=True)
class Forecast:
    """How long a plan will take, as far as this machine was measured, in seconds.

    load_s: all that is read, one after the other. recompute_s: all that is computed, were every byte at hand. ttft_s:
    until the first logits, one behind the other. full_s: full prefill. segments: (segment, seconds to read it, seconds
    to compute its rows) of all that could be reused; those that are left unread say what reading would take.
    corrections: (tier, times) of tiers that lately took so many times as long as measured; all of this counts with it.
    """

    load_s: float
    recompute_s: float
    ttft_s: float
    full_s: float
    bound: Bound = "floor"
    deadline_s: float | None = None
    segments: tuple[tuple[int, float, float], ...] = ()
    corrections: tuple[tuple[str, float], ...] = ()

    @property
    def is_late(self) -> bool:
        """Whether the first logits come after the deadline."""
        return self.deadline_s is not None and self.ttft_s > self.deadline_s

    def full(self) -> Forecast:
        """The same for full prefill instead."""
        return replace(self, load_s=0.0, recompute_s=self.full_s, ttft_s=self.full_s, segments=())
