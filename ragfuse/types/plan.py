"""The plan for one prompt: which segments are read, which are computed, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ragfuse.types.keys import ChunkKey
from ragfuse.types.policy_cost import BY_RATIO, PolicyCost
from ragfuse.types.prompt import Prompt

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


@dataclass(frozen=True)
class Fetch:
    """One segment to be read: which, from which tier, at which codec level, and how many tokens that gives.

    sizes: (level, bytes) of all levels that there are, what loses least first.
    """

    segment: int
    key: ChunkKey
    tier: str
    level: str
    nbytes: int
    n_tokens: int = 0
    sizes: tuple[tuple[str, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class LoadPlan:
    """What will be read and what computed. A value: `load` obeys it, `fuse` does not know that it exists.

    `misses` are (segment, why). `fallback_reason` is the reason for full prefill, "" when the prompt is fused. `unread`
    are in the store and all the same computed anew, because that is sooner. On a machine that was not measured,
    `forecast` is None and `layers_a_read` 0: as `load` sees fit. n_before: tokens of a refused prompt whose state is
    kept from an earlier one (`hf.states`). cost: of the policy.
    """

    prompt: Prompt
    ratio: float
    policy: str
    fetches: tuple[Fetch, ...] = ()
    misses: tuple[tuple[int, str], ...] = ()
    fallback_reason: str = ""
    unread: tuple[Fetch, ...] = ()
    layers_a_read: int = 0
    forecast: Forecast | None = None
    n_before: int = 0
    cost: PolicyCost = BY_RATIO

    def with_full_prefill(self, why: str) -> LoadPlan:
        """Full prefill instead, and the reason."""
        return replace(
            self, fallback_reason=why, fetches=(), misses=(), forecast=self.forecast and self.forecast.full()
        )

    def explain(self) -> str:
        """The plan in one line a person can read; `plan.words` tells all of it."""
        if self.fallback_reason:
            known = f", {self.n_before} of them from an earlier prompt's state" if self.n_before else ""
            return f"full prefill of {len(self.prompt)} tokens{known}: {self.fallback_reason}"
        nbytes = sum(fetch.nbytes for fetch in self.fetches)
        found, missing = f"{len(self.fetches)} segments from the store", f"{len(self.misses)} missing"
        return f"{found} ({nbytes / 1e6:.1f} MB), {missing}, ratio {self.ratio:.2f} by {self.policy}"
