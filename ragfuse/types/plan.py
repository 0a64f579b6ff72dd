"""The plan for one prompt: which segments are read, which are computed, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.policy_cost import BY_RATIO, PolicyCost
from ragfuse.types.prompt import Prompt
from ragfuse.types.sizes import size_text

Bound = Literal["floor", "loading", "deadline", "asked"]
"""What bounds the ratio: the smallest safe ratio, what loading hides, the deadline, or the caller's
own ratio.
"""


@dataclass(frozen=True)
class Forecast:
    """How long a plan will take on a measured machine, in seconds.

    Args:
        load_s: Reading everything, without computing.
        recompute_s: Computing everything, with all KV already loaded.
        ttft_s: Time to the first logits, where loading and computing overlap.
        full_s: Full prefill of the prompt.
        bound: What bounds the recompute ratio.
        deadline_s: The deadline for the first token; None for none.
    """

    load_s: float
    recompute_s: float
    ttft_s: float
    full_s: float
    bound: Bound = "floor"
    deadline_s: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether the first logits come after the deadline."""
        return self.deadline_s is not None and self.ttft_s > self.deadline_s

    def full(self) -> Forecast:
        """Return the forecast of a full prefill instead."""
        return replace(self, load_s=0.0, recompute_s=self.full_s, ttft_s=self.full_s)


@dataclass(frozen=True)
class Fetch:
    """One segment of the prompt whose KV is read from a tier.

    Args:
        segment: Index of the segment in the prompt.
        key: The key of its entry.
        tier: Name of the tier.
        level: The codec level to read.
        nbytes: Bytes to read.
        n_tokens: Tokens of the entry.
        sizes: (level, bytes) of all stored levels, from the least to the most lossy.
    """

    segment: int
    key: ChunkKey
    tier: str
    level: str
    nbytes: int
    n_tokens: int = 0
    sizes: tuple[tuple[str, int], ...] = field(default=(), compare=False)


def is_blended(prompt: Prompt, fetch: Fetch) -> bool:
    """Return whether a policy may choose rows of a fetched segment to recompute."""
    return prompt.segments[fetch.segment].kind == "chunk" and not is_exact(prompt, fetch)


def is_exact(prompt: Prompt, fetch: Fetch) -> bool:
    """Return whether a fetched segment attended to exactly the tokens before it here, so that its
    KV equals full prefill's.
    """
    segment, before = prompt.segments[fetch.segment], prompt.segments[: fetch.segment]
    lo, start = prompt.spans[fetch.segment][0], segment.start
    if segment.kind == "prefix":
        return True  # the prefix cache holds only exact KV
    if fetch.key.encoded == "filler":
        return False
    if segment.rows is not None and segment.rows[0]:
        whole = all(fetch.key in each.keys and each.shift == segment.shift for each in before)
        return whole and segment.rows[0] == lo and not fetch.key.context
    if not lo or not fetch.key.context:
        return not lo and not fetch.key.context
    gapless = start - lo == prompt.segments[0].start
    return gapless and fetch.key.context == token_digest(prompt.token_ids[:lo])


@dataclass(frozen=True)
class LoadPlan:
    """The decision for one prompt: what is read and what is computed. A plain value; `ragfuse.load`
    executes it.

    Args:
        prompt: The prompt.
        ratio: The recompute ratio, 0..1.
        policy: The selection policy.
        fetches: Segments to read.
        misses: (segment index, reason) of segments that are computed although they could have been
            in the store.
        fallback_reason: Why the prompt gets a full prefill; "" where it is fused.
        unread: Segments that are in the store but computed, because that is faster than reading
            them.
        layers_a_read: Layers that are read together; 0: `ragfuse.load` decides (this machine was
            not measured).
        forecast: Predicted times; None: this machine was not measured.
        cost: The cost of the policy.
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
    cost: PolicyCost = BY_RATIO

    @property
    def chooses(self) -> bool:
        """Whether the policy has tokens to choose: some that are read may be recomputed, and some
        of them will be.
        """
        recomputes = self.ratio > 0 and self.cost.fixed_share != 0.0
        return recomputes and any(is_blended(self.prompt, fetch) for fetch in self.fetches)

    def with_full_prefill(self, why: str) -> LoadPlan:
        """Return the plan of a full prefill of the same prompt, with the reason."""
        return replace(
            self,
            fallback_reason=why,
            fetches=(),
            misses=(),
            forecast=self.forecast and self.forecast.full(),
        )

    def explain(self) -> str:
        """Return the plan in one readable line; `plan.explanation.in_words` has all of it."""
        if self.fallback_reason:
            return f"full prefill of {len(self.prompt)} tokens: {self.fallback_reason}"
        missing = f"{len(self.misses)} missing"
        if not self.fetches:
            return f"nothing from the store, {missing}"
        segments = "1 segment" if len(self.fetches) == 1 else f"{len(self.fetches)} segments"
        found = f"{segments} from the store ({size_text(sum(f.nbytes for f in self.fetches))})"
        chosen = (
            f"ratio {self.ratio:.2f} by {self.policy}" if self.chooses else "nothing recomputed"
        )
        return f"{found}, {missing}, {chosen}"
