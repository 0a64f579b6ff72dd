"""The loading controller (CacheBlend 5.1), which plans what to read and what to compute.

Other functions choose the tier for a new chunk, the conversations to prefetch, and the number of
layers to read before a prefill. Plans depend on the store's entries and, on a measured machine, on
the costs of reading and computing. Nothing here reads a clock, a file or a tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor, inf
from types import MappingProxyType
from typing import TypeVar

from ragfuse.plan.cost import Blend, CostModel
from ragfuse.types.choices import loss
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry
from ragfuse.types.plan import (
    AUTO,
    MISSING,
    UNREADABLE,
    Bound,
    Fetch,
    Forecast,
    LoadPlan,
    PolicyCost,
    is_blended,
)
from ragfuse.types.prompt import Prompt, Segment

MEASURED = ("hkvd", 0.15)
"""Policy and ratio if no calibrated choice applies (CacheBlend 4.3)."""
TIE = 0.02
"""If two plans differ in TTFT by less than this share, both count as equally fast."""
MIN_GAIN = 0.1
"""A less lossy codec level is read if its TTFT exceeds the lowest TTFT by at most this share."""
SLOWER = "slower to load than to compute"


def settle(
    policy: str, ratio: float | None, choice: tuple[str, float] | None = None
) -> tuple[str, float]:
    """Return the selection policy and recompute ratio for one prompt.

    Args:
        policy: Name of a selection policy, or "auto".
        ratio: The recompute ratio. None means the ratio of `choice` if `policy` is "auto", else the
            ratio of `MEASURED`.
        choice: Policy and ratio for "auto". None means `MEASURED`.
    """
    chosen = choice if choice is not None and policy == AUTO else MEASURED
    return chosen[0] if policy == AUTO else policy, chosen[1] if ratio is None else ratio


@dataclass(frozen=True)
class Controller:
    """Makes the load plan of a prompt: which KV is read, and what is computed.

    If the caller sets `policy` or `ratio`, every stored segment is read, even if it would be faster
    to compute the segment or the whole prompt.

    Args:
        cost_of: Returns the cost of a policy by name.
        costs: Costs of reading and computing on this machine. None, or costs without tiers, if the
            machine was not measured.
        choice: The model's calibrated policy and ratio. "auto" uses `choice` if all blended chunks
            were encoded after filler text, and otherwise `MEASURED`. None means `MEASURED`.
        policy: Name of a selection policy, or "auto".
        ratio: The recompute ratio. If None, the ratio of `choice` or `MEASURED` is the minimum. On
            a measured machine, the ratio is raised as long as loading hides the extra compute.
        deadline_s: Seconds from now until the first token is wanted. The ratio is raised only as
            far as the deadline allows. If even the lowest ratio is too slow, the plan is late.
        streamed: Names of tiers that are streamed under a deadline. If full prefill is too slow for
            the deadline, these tiers are read even if the plan is late, because streaming may meet
            the deadline at another codec level.
    """

    cost_of: Callable[[str], PolicyCost]
    costs: CostModel | None = None
    choice: tuple[str, float] | None = None
    policy: str = AUTO
    ratio: float | None = None
    deadline_s: float | None = None
    streamed: Collection[str] = ()

    def plan(
        self,
        prompt: Prompt,
        entries: Mapping[ChunkKey, Entry],
        lost: frozenset[int] = frozenset(),
    ) -> LoadPlan:
        """Return the load plan of a prompt, with predicted times on a measured machine.

        Each stored segment is read under the first of the segment's keys that has an entry. On a
        measured machine, a lossier level is read only if TTFT is clearly lower (`MIN_GAIN`). If
        `ratio` is None, the ratio is raised as long as loading hides the extra compute.

        Args:
            prompt: The prompt.
            entries: The store's entries, by key.
            lost: Indices of segments whose entries could not be read.
        """
        found, misses = _found(prompt, entries, lost)
        costs = self.costs
        if costs is None or not costs.knows([ways[0] for ways in found.values()]):
            return self._made(prompt, [ways[0] for ways in found.values()], misses)
        for at, ways in found.items():
            found[at] = [way for way in ways if costs.knows([way])]
        timed = self._at_best_levels(costs, prompt, found, misses)
        full_s = costs.prefill_s(len(prompt))
        is_streamed = (
            self.deadline_s is not None
            and full_s > self.deadline_s
            and any(fetch.tier in self.streamed for fetch in timed.plan.fetches)
        )
        keeps_all = is_streamed or self.policy != AUTO or self.ratio is not None
        if not keeps_all and timed.is_loading:
            timed = self._without_slow(timed, misses)
        base_s = timed.ttft_s
        chosen: tuple[float, Bound] = (
            (self.ratio, "asked") if self.ratio is not None else widest(timed, self.deadline_s)
        )
        planned = timed.at(chosen[0]).foretold(chosen[1], self.deadline_s)
        if keeps_all or not found or base_s < full_s:
            return planned
        unread = tuple(sorted((*planned.fetches, *planned.unread), key=_segment_of))
        all_misses = misses | {fetch.segment: "full prefill is faster" for fetch in unread}
        why = f"full prefill is predicted to be faster: {full_s:.3f} s, fusing {base_s:.3f} s"
        return replace(
            planned.with_full_prefill(why), misses=tuple(sorted(all_misses.items())), unread=unread
        )

    def _made(
        self,
        prompt: Prompt,
        fetches: Iterable[Fetch],
        misses: Mapping[int, str],
        unread: Sequence[Fetch] = (),
    ) -> LoadPlan:
        read = tuple(_once(fetches))
        all_behind_filler = all(
            fetch.key.encoded == "filler" for fetch in read if is_blended(prompt, fetch)
        )
        name, share = settle(self.policy, self.ratio, self.choice if all_behind_filler else None)
        reasons = tuple(sorted(misses.items()))
        return LoadPlan(
            prompt,
            share,
            name,
            read,
            reasons,
            unread=tuple(sorted(unread, key=_segment_of)),
            cost=self.cost_of(name),
        )

    def _at_best_levels(
        self,
        costs: CostModel,
        prompt: Prompt,
        found: Mapping[int, list[Fetch]],
        misses: Mapping[int, str],
    ) -> Timed:
        """Return the least lossy plan whose TTFT is close to the lowest TTFT (`MIN_GAIN`)."""
        ranks = {loss(way.level) for ways in found.values() for way in ways} or {0}
        plans = list[Timed]()
        for rank in sorted(ranks):
            allowed = [
                [way for way in ways if loss(way.level) <= rank] or ways[:1]
                for ways in found.values()
            ]
            fetches = [
                min(ways, key=lambda way: (costs.fetch_s(way), loss(way.level))) for ways in allowed
            ]
            plans.append(Timed(costs, self._made(prompt, fetches, misses)))
        limit_s = (1 + MIN_GAIN) * min(each.ttft_s for each in plans)
        return next(each for each in plans if each.ttft_s <= limit_s)

    def _without_slow(self, timed: Timed, misses: Mapping[int, str]) -> Timed:
        """Drop reads of segments that are slower to load than to compute, as long as TTFT falls.

        The segment that loads slowest per token is dropped first. At least one segment is read.
        """
        costs, segments = timed.costs, timed.plan.prompt.segments
        slowest = sorted(
            timed.plan.fetches,
            key=lambda fetch: -costs.fetch_s(fetch) / len(segments[fetch.segment].tokens),
        )
        for n_unread in range(1, len(slowest)):
            unread, read = slowest[:n_unread], sorted(slowest[n_unread:], key=_segment_of)
            skipped = dict.fromkeys((fetch.segment for fetch in unread), SLOWER)
            tried = Timed(costs, self._made(timed.plan.prompt, read, {**misses, **skipped}, unread))
            n_tokens = len(segments[unread[-1].segment].tokens)
            without = replace(tried.blend, forced=tried.blend.forced - n_tokens)
            compute_s = costs.fused_s(tried.blend) - costs.fused_s(without)
            if compute_s >= costs.fetch_s(unread[-1]) or tried.ttft_s >= timed.ttft_s:
                break
            timed = tried
        return timed


def _found(
    prompt: Prompt, entries: Mapping[ChunkKey, Entry], lost: frozenset[int]
) -> tuple[dict[int, list[Fetch]], dict[int, str]]:
    """Return the possible fetches of each stored segment, and the reason for each miss."""
    found, misses = dict[int, list[Fetch]](), dict[int, str]()
    for index, segment in enumerate(prompt.segments):
        if segment.kind == "fresh":
            continue
        entry = next((entries[key] for key in segment.keys if key in entries), None)
        if index in lost:
            misses[index] = UNREADABLE
        elif entry is None:
            misses[index] = MISSING
        elif not _fits(entry.n_tokens, segment):
            misses[index] = f"the stored entry has a different length: {entry.n_tokens} tokens"
        elif not entry.nbytes:
            misses[index] = "the stored entry is empty"
        else:
            sizes = tuple(entry.sizes.items())
            found[index] = [
                Fetch(index, entry.key, entry.tier, level, size, entry.n_tokens, sizes)
                for level, size in sizes
            ]
    return found, misses


def _once(fetches: Iterable[Fetch]) -> Iterator[Fetch]:
    """Yield all fetches. A fetch gets 0 bytes if an earlier fetch reads the same entry."""
    seen = set()
    for fetch in fetches:
        read = (fetch.key, fetch.tier, fetch.level)
        yield replace(fetch, nbytes=0) if read in seen else fetch
        seen.add(read)


def _segment_of(fetch: Fetch) -> int:
    return fetch.segment


def _fits(n_tokens: int, segment: Segment) -> bool:
    return n_tokens == len(segment.tokens) if segment.rows is None else n_tokens >= segment.rows[1]


@dataclass(frozen=True)
class Timed:
    """A load plan with its predicted loading time, computing time and TTFT."""

    costs: CostModel
    plan: LoadPlan

    @cached_property
    def blend(self) -> Blend:
        """The row counts of the plan's fused prefill."""
        return Blend.of(self.plan)

    @cached_property
    def ttft_s(self) -> float:
        """Predicted seconds to the first logits."""
        return self.costs.ttft_s(self.blend, self.plan.fetches, self.layers_a_read)

    @cached_property
    def layers_a_read(self) -> int:
        """Number of layers per read for the lowest TTFT. 0 if the plan reads nothing."""
        fetches = self.plan.fetches
        counts = self.costs.counts(fetches) if fetches else [0]
        return min(counts, key=lambda count: self.costs.ttft_s(self.blend, fetches, count))

    def at(self, ratio: float) -> Timed:
        """Return a copy of the plan with recompute ratio `ratio`."""
        return replace(self, plan=replace(self.plan, ratio=ratio))

    @property
    def load_s(self) -> float:
        """Predicted seconds of all reads. 0 if the plan reads nothing."""
        return (
            sum(self.costs.steps_s(self.plan.fetches, self.layers_a_read))
            if self.plan.fetches
            else 0.0
        )

    @property
    def is_loading(self) -> bool:
        """True if the first token waits for loading rather than for computing."""
        return self.load_s > 0 and self.ttft_s > (1 + TIE) * self.costs.fused_s(self.blend)

    def foretold(self, bound: Bound, deadline_s: float | None) -> LoadPlan:
        """Return the load plan with a `Forecast` and the number of layers per read."""
        costs, plan = self.costs, self.plan
        full_s = costs.prefill_s(len(plan.prompt))
        forecast = Forecast(
            load_s=self.load_s,
            recompute_s=costs.fused_s(self.blend) if plan.fetches else full_s,
            ttft_s=self.ttft_s,
            full_s=full_s,
            bound=bound,
            deadline_s=deadline_s,
        )
        return replace(plan, layers_a_read=self.layers_a_read, forecast=forecast)


def widest(timed: Timed, deadline_s: float | None = None) -> tuple[float, Bound]:
    """Return the largest ratio whose extra compute is hidden by loading (CacheBlend 5.1).

    Compute is hidden if TTFT grows by at most `TIE`. The second result is the limit that set the
    ratio. The ratio is never below the plan's ratio, even if the plan misses the deadline.
    """
    min_ratio = timed.plan.ratio
    hidden_s = timed.ttft_s + TIE * min(timed.ttft_s, timed.load_s)
    if not (0 < min_ratio < 1 and timed.blend.candidate_rows and timed.plan.cost.is_adjustable):
        return min_ratio, "floor"
    hundredths = range(floor(100 * min_ratio) + 1, 101)

    def largest(within_s: float) -> float:
        n_within = bisect_right(
            hundredths, within_s, key=lambda ratio: timed.at(ratio / 100).ttft_s
        )
        return max(min_ratio, (hundredths.start + n_within - 1) / 100)

    ratio = largest(hidden_s)
    if deadline_s is not None and timed.at(ratio).ttft_s > deadline_s:
        return largest(deadline_s), "deadline"
    return ratio, "loading" if ratio > min_ratio else "floor"


T = TypeVar("T")

PRICES: Mapping[str, float] = MappingProxyType(
    {"memory": 3.0, "disk": 0.08, "redis": 5.0, "objects": 0.023}
)
"""The price of 10^9 bytes per month, by kind of tier. Only the ratios between prices matter."""


def choose_tier(
    n_tokens: int, nbytes: int, costs: CostModel, tiers: Mapping[str, Sequence[str]], ratio: float
) -> str | None:
    """Return the tier to store a new chunk in (CacheBlend 5.1).

    The result is the cheapest tier that loads the chunk in at most `ratio` times the time of the
    chunk's full prefill. If no tier is that fast, the result is the fastest tier.

    Args:
        n_tokens: Number of tokens in the chunk.
        nbytes: Bytes of the chunk at level raw.
        costs: Costs of reading and computing on this machine.
        tiers: The candidate tiers, with the codec levels that each tier stores. The chunk is loaded
            at the fastest level; the price is the sum over all levels.
        ratio: The recompute ratio.

    Returns:
        The name of the tier. If prices are equal, the faster tier is returned. None if no tier was
        measured.
    """
    known = {
        tier: [level for level in levels if costs.knows_level(level)]
        for tier, levels in tiers.items()
        if tier in costs.tiers
    }
    load_s = {
        tier: min(costs.stored_s(tier, level, nbytes, n_tokens) for level in levels)
        for tier, levels in known.items()
        if levels
    }

    def price(tier: str) -> float:
        kind = next((PRICES[kind] for kind in PRICES if tier.startswith(kind)), inf)
        return kind * sum(costs.packed.get(level, 1.0) for level in known[tier])

    limit_s = costs.recompute_s(ratio, n_tokens)
    hidden = [tier for tier, seconds in load_s.items() if seconds <= limit_s]
    if not hidden:
        return min(load_s, key=lambda tier: load_s[tier], default=None)
    return min(hidden, key=lambda tier: (price(tier), load_s[tier]))


def to_prefetch(waiting: Iterable[tuple[T, int]], memory_bytes: int) -> Iterator[T]:
    """Yield conversations to prefetch, in queue order, as long as all of them fit into memory.

    AttentionStore 3.3.1 counts conversations of average size; this function counts bytes. The first
    conversation that does not fit ends the result, so that later conversations do not overtake it.

    Args:
        waiting: (conversation, stored bytes) of each waiting job, from head to tail of the queue.
        memory_bytes: Bytes of memory available for the conversations.
    """
    for conversation, nbytes in waiting:
        memory_bytes -= nbytes
        if memory_bytes < 0:
            return
        yield conversation


def layers_before(plan: LoadPlan, n_layers: int) -> int:
    """Return the number of layers to read before a prefill, so that no layer waits for cached KV.

    This is the read buffer S_buf of AttentionStore (section 3.2.1), in whole layers, rounded up.
    The result is 0 on an unmeasured machine, or if computing takes longer than loading.
    """
    forecast = plan.forecast
    if forecast is None or not plan.fetches or forecast.load_s <= 0:
        return 0
    share = 1 - forecast.recompute_s / forecast.load_s
    return max(0, ceil(n_layers * share - 1e-9))
