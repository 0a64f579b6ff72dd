"""The load plan of one prompt: planned reads, recomputation, predicted times, and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.prompt import Prompt
from ragfuse.types.sizes import size_text

FULL_PREFILL_ASKED = "full prefill was requested"
NOTHING_STORED = "none of this text is stored yet"
NOT_ENCODED = "no KV of these passages yet: encoded after the answer"
DOCUMENTS_ALTERED = "the prompt alters the retrieved documents, so none of them was recognised"
PROMPT_TOO_SHORT = "the prompt is too short to hold a chunk"
NOT_EXACT = "this model failed `ragfuse verify`; set a policy to reuse KV anyway"
NOT_SAFE = "`ragfuse calibrate` found no safe policy for this model; set one to reuse KV anyway"
ENCODING = "still being encoded, for the next question"
"""Miss reason of a chunk of an earlier prompt, while the chunk is still being encoded."""
MISSING = "not in the store"
CODE = "source code, which is reused only as part of a prefix"
"""The miss reason and the `Segment.source` of recurring source code, which is never blended."""
UNREADABLE = "the stored entry could not be read"


AUTO = "auto"
"""A policy name that means the model's calibrated choice, or a default if there is none."""
STAIRS = 8
"""Maximum number of times that rows are chosen per prefill. Each choice needs new masks."""
Needs = Literal["nothing", "all rows of a layer", "attention"]
"""Input that a policy needs to choose rows. "attention" is a pass over 3/4 of the layers."""


def watched_layers(n_layers: int) -> range:
    """Return the layers in which the question's attention is measured: the third quarter.

    Earlier layers attend to nearby tokens. Later layers prepare the next token. The pass that
    measures attention ends after the returned layers.
    """
    first = n_layers // 2
    return range(first, max(first + 1, 3 * n_layers // 4))


def schedule(ratio: float, layer: int, first: int, n_layers: int) -> float:
    """Return the share of candidate rows to recompute in `layer` (CacheBlend 4.3).

    The share falls from `1.5 * ratio` to `0.5 * ratio`, in at most `STAIRS` steps because each
    choice of rows costs a dozen operations.

    Args:
        ratio: The mean share over layers first..n_layers-1, even if `1.5 * ratio` exceeds 1.
        layer: Index of the layer.
        first: Index of the first layer in which rows are chosen.
        n_layers: Number of layers of the model.
    """
    n_scheduled = n_layers - first
    if n_scheduled < 2:
        return ratio
    width = -(-n_scheduled // STAIRS)
    stair = (layer - first) // width * width
    middle = (stair + min(stair + width, n_scheduled) - 1) / 2
    start = min(1.0, 1.5 * ratio)
    return start + 2 * (ratio - start) * middle / (n_scheduled - 1)


@dataclass(frozen=True)
class PolicyCost:
    """The number of rows that a policy recomputes, and the input that the policy needs.

    Args:
        needs: The input that must be computed before rows are chosen.
        fixed_share: Share of candidate rows that the policy always recomputes, 0..1. If None, the
            recompute ratio decides.
        tokens_per_chunk: Number of tokens that the policy always recomputes in each chunk. If 0,
            the recompute ratio decides.
    """

    needs: Needs = "nothing"
    fixed_share: float | None = None
    tokens_per_chunk: int = 0

    @property
    def is_adjustable(self) -> bool:
        """True if a higher ratio recomputes more rows."""
        return self.fixed_share is None and not self.tokens_per_chunk

    def share_of(self, ratio: float, chunks: Sequence[int]) -> float:
        """Return the share of the chunks' rows that the policy recomputes.

        Ratio 0 gives 0 and ratio 1 gives 1 for any policy.

        Args:
            ratio: The recompute ratio, 0..1.
            chunks: The number of tokens in each chunk.
        """
        if not ratio or not chunks:
            return 0.0
        if ratio >= 1:
            return 1.0
        if self.fixed_share is not None:
            return self.fixed_share
        if self.tokens_per_chunk:
            return sum(min(self.tokens_per_chunk, n) for n in chunks) / sum(chunks)
        return ratio


BY_RATIO = PolicyCost()
"""The cost of a policy that recomputes as many rows as the ratio says, and needs no input."""


Bound = Literal["floor", "loading", "deadline", "asked"]
"""What set the recompute ratio: the smallest safe ratio, loading, the deadline, or the caller."""


@dataclass(frozen=True)
class Forecast:
    """Predicted times of a plan on a measured machine, in seconds.

    Args:
        load_s: Time to read all fetches, without computing.
        recompute_s: Time to compute, with all KV already loaded.
        ttft_s: Time to the first logits, with loading and computing overlapped.
        full_s: Time of a full prefill of the prompt.
        bound: The limit that set the recompute ratio.
        deadline_s: The deadline for the first token. None means no deadline.
    """

    load_s: float
    recompute_s: float
    ttft_s: float
    full_s: float
    bound: Bound = "floor"
    deadline_s: float | None = None

    @property
    def is_late(self) -> bool:
        """True if the first logits are predicted to come after the deadline."""
        return self.deadline_s is not None and self.ttft_s > self.deadline_s

    def full(self) -> Forecast:
        """Return this forecast for a full prefill of the same prompt."""
        return replace(self, load_s=0.0, recompute_s=self.full_s, ttft_s=self.full_s)


@dataclass(frozen=True)
class Fetch:
    """A planned read: the KV of one segment of the prompt, from one tier.

    Args:
        segment: Index of the segment in the prompt.
        key: The key of the entry that has the KV.
        tier: Name of the tier.
        level: The codec level to read.
        nbytes: Bytes to read. 0 if an earlier fetch reads the same bytes.
        n_tokens: Number of tokens in the entry.
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
    """Return whether a policy may recompute rows of the segment that `fetch` loads."""
    return prompt.segments[fetch.segment].kind == "chunk" and not is_exact(prompt, fetch)


def is_exact(prompt: Prompt, fetch: Fetch) -> bool:
    """Return whether a fetched segment's KV equals what full prefill of the prompt computes.

    The KV must have been encoded after exactly the tokens that precede the segment in the prompt.
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
    """The plan for one prompt: which KV is read, and which rows are recomputed.

    Args:
        prompt: The prompt.
        ratio: The recompute ratio, 0..1.
        policy: The selection policy.
        fetches: Segments to read.
        misses: (index, reason) of each segment that must be computed although it could be stored.
        fallback_reason: Why the prompt gets a full prefill. "" if the prompt is fused.
        unread: Segments that are in the store but are computed, because reading their KV is too
            slow.
        layers_a_read: Number of layers per read. If 0, `ragfuse.load` chooses the number.
        forecast: Predicted times. None if this machine was not measured.
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
        """True if the policy chooses which of the loaded tokens are recomputed."""
        recomputes = self.ratio > 0 and self.cost.fixed_share != 0.0
        return recomputes and any(is_blended(self.prompt, fetch) for fetch in self.fetches)

    def with_full_prefill(self, why: str) -> LoadPlan:
        """Return the plan of a full prefill of the same prompt, for the reason `why`."""
        return replace(
            self,
            fallback_reason=why,
            fetches=(),
            misses=(),
            forecast=self.forecast and self.forecast.full(),
        )

    def explain(self) -> str:
        """Return the plan in one line of text. `plan.explanation.in_words` has all details."""
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
