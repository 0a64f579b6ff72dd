"""The loading controller: decides what is read and what is computed for one prompt (CacheBlend 5.1).

`plan` decides by what the store holds; `LoadingController` also by how long things take on this machine, where it was
measured. Nothing here reads a clock, a file or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import floor
from types import MappingProxyType

from ragfuse.plan.estimate import Blend, Estimate
from ragfuse.plan.observed import corrected
from ragfuse.plan.read_options import MIN_GAIN, ReadOptions, fastest, lossier, read_options
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry
from ragfuse.types.plan import Bound, Fetch, Forecast, LoadPlan, is_blended
from ragfuse.types.policy_cost import AUTO, CostOf
from ragfuse.types.profiles import MachineProfile
from ragfuse.types.prompt import Prompt, Segment
from ragfuse.types.reasons import MISSING, UNREADABLE

MEASURED = ("hkvd", 0.15)
"""Policy and ratio for chunks that were not encoded after filler text (CacheBlend 4.3)."""

TIE = 0.02
"""Plans whose times to the first token differ by less than this share count as equally fast."""
SLOWER = "slower to load than to compute"
NONE_SKIPPED: Mapping[int, str] = MappingProxyType({})
NO_WAYS: Mapping[int, Fetch] = MappingProxyType({})
NO_COPIES: Mapping[ChunkKey, list[Entry]] = MappingProxyType({})


def plan(
    prompt: Prompt,
    entries: Mapping[ChunkKey, Entry],
    policy: str = AUTO,
    ratio: float | None = None,
    lost: frozenset[int] = frozenset(),
    choice: tuple[str, float] | None = None,
    skipped: Mapping[int, str] = NONE_SKIPPED,
    ways: Mapping[int, Fetch] = NO_WAYS,
    *,
    cost_of: CostOf,
) -> LoadPlan:
    """Return the plan that reads every segment that is in the store, under the best of its keys.

    Args:
        prompt: The prompt.
        entries: What the store holds, by key.
        policy: A selection policy, or "auto".
        ratio: The recompute ratio; None: 0.15, or that of `choice`.
        lost: Segments whose entries could not be read.
        choice: Policy and ratio that suit the model, which "auto" uses if all chunks were encoded after filler text.
        skipped: Segments to recompute although they are in the store, with the reason.
        ways: Tier and level from which to read a segment; by default the tier where it was found, at its least lossy
            level.
        cost_of: The costs of policies by name.
    """
    fetches, unread, misses = list[Fetch](), list[Fetch](), list[tuple[int, str]]()
    for index, segment in enumerate(prompt.segments):
        if segment.kind == "fresh":
            continue
        entry = next((entries[key] for key in segment.keys if key in entries), None)
        if index in lost:
            misses.append((index, UNREADABLE))
        elif entry is None:
            misses.append((index, MISSING))
        elif not _fits(entry.n_tokens, segment):
            misses.append((index, f"its entry has {entry.n_tokens} tokens"))
        elif not entry.nbytes:
            misses.append((index, "its entry is empty"))
        else:
            level, nbytes = next(iter(entry.sizes.items()))
            read = Fetch(index, entry.key, entry.tier, level, nbytes, entry.n_tokens, tuple(entry.sizes.items()))
            fetch = ways.get(index, read)
            (unread if index in skipped else fetches).append(fetch)
            misses += [(index, skipped[index])] if index in skipped else []
    fetches = list(_once(fetches))
    blended = [fetch for fetch in fetches if is_blended(prompt, fetch)]
    all_behind_filler = bool(blended) and all(f.key.encoded == "filler" for f in blended)
    name, share = settle(policy, ratio, choice if all_behind_filler else None)
    return LoadPlan(prompt, share, name, tuple(fetches), tuple(misses), unread=tuple(unread), cost=cost_of(name))


def _once(fetches: Sequence[Fetch]) -> Iterator[Fetch]:
    """Count the bytes of an entry that several segments use once, because it is read once."""
    seen = set()
    for fetch in fetches:
        read = (fetch.key, fetch.tier, fetch.level)
        yield replace(fetch, nbytes=0) if read in seen else fetch
        seen.add(read)


def _fits(n_tokens: int, segment: Segment) -> bool:
    """Return whether an entry of `n_tokens` has the rows that a segment uses."""
    return n_tokens == len(segment.tokens) if segment.rows is None else n_tokens >= segment.rows[1]


def settle(policy: str, ratio: float | None, choice: tuple[str, float] | None = None) -> tuple[str, float]:
    """Return the policy and ratio of one prompt.

    Args:
        policy: A selection policy, or "auto".
        ratio: The recompute ratio; None: the default of the policy that is chosen.
        choice: Policy and ratio for "auto"; None: `MEASURED`.
    """
    chosen = choice if choice is not None and policy == AUTO else MEASURED
    return chosen[0] if policy == AUTO else policy, chosen[1] if ratio is None else ratio


def blend_of(load_plan: LoadPlan) -> Blend:
    """Return the row counts of a plan's fused prefill, from which its time is estimated."""
    prompt = load_plan.prompt
    sizes = [len(prompt.segments[fetch.segment].tokens) for fetch in load_plan.fetches]
    chunks = [n for n, fetch in zip(sizes, load_plan.fetches, strict=True) if is_blended(prompt, fetch)]
    share = load_plan.cost.share_of(load_plan.ratio, chunks)
    return Blend(load_plan.cost, len(prompt), len(prompt) - sum(sizes), sum(chunks), share)


@dataclass(frozen=True)
class LoadingController:
    """Plans prompts by predicted times on a measured machine, and as `plan` does on any other.

    A policy or ratio that the caller names is kept: then no chunk is left unread and no full prefill chosen to save
    time, and the plan only predicts.

    Args:
        cost_of: The costs of policies by name.
        machine: Timings of this machine; None: not measured.
        choice: Policy and ratio that suit the model, for "auto"; None: `MEASURED`.
        corrections: By tier, the factor by which it recently took longer than measured, see `plan.observed`.
    """

    cost_of: CostOf
    machine: MachineProfile | None = None
    choice: tuple[str, float] | None = None
    corrections: Mapping[str, float] = field(default_factory=dict)

    def plan(
        self,
        prompt: Prompt,
        entries: Mapping[ChunkKey, Entry],
        policy: str = AUTO,
        ratio: float | None = None,
        lost: frozenset[int] = frozenset(),
        deadline_s: float | None = None,
        others: Mapping[ChunkKey, list[Entry]] = NO_COPIES,
    ) -> LoadPlan:
        """Return what to read, what to compute, and how long that will take.

        The ratio is raised as far as loading hides the extra compute, and never falls below the one that keeps answers
        close to full prefill's. Segments stored at several levels are read at the least lossy one that hides behind
        computing, see `plan.read_options`.

        Args:
            prompt: The prompt.
            entries: What the store holds, by key.
            policy: A selection policy, or "auto".
            ratio: The recompute ratio; None: chosen here.
            lost: Segments whose entries could not be read.
            deadline_s: Seconds from now until the first token is wanted. It bounds the ratio from above; where even the
                smallest ratio is too slow, the forecast says so.
            others: Entries of the same keys in further tiers.
        """
        first_plan = plan(prompt, entries, policy, ratio, lost, self.choice, cost_of=self.cost_of)
        if self.machine is None or not Estimate(self.machine).knows(first_plan.fetches):
            return first_plan

        def replan(ways: Mapping[int, Fetch], skipped: Mapping[int, str] = NONE_SKIPPED) -> LoadPlan:
            return plan(prompt, entries, policy, ratio, lost, self.choice, skipped, ways, cost_of=self.cost_of)

        estimate = Estimate(corrected(self.machine, self.corrections))
        ways, timed = _at_levels(estimate, read_options(estimate, first_plan.fetches, entries, others), replan)
        by_caller = policy != AUTO or ratio is not None
        if not by_caller and timed.is_loading:
            timed = _without_slow(timed, partial(replan, ways))
        base_s = timed.ttft_s
        chosen: tuple[float, Bound] = (ratio, "asked") if ratio is not None else widest(timed, deadline_s)
        timed = timed.at(chosen[0]).in_best_steps()
        forecast = _forecast(timed, chosen[1], deadline_s)
        tiers = {fetch.tier for fetch in (*timed.load_plan.fetches, *timed.load_plan.unread)}
        used = tuple((tier, times) for tier, times in sorted(self.corrections.items()) if tier in tiers)
        predicted = replace(timed.load_plan, forecast=replace(forecast, corrections=used))
        if by_caller or not first_plan.fetches or base_s < timed.full_s:
            return predicted
        return _in_full(predicted, base_s)


@dataclass(frozen=True)
class Timed:
    """A plan with its predicted times.

    Args:
        estimate: The estimate for this machine.
        load_plan: The plan.
        blend: Its fused prefill in row counts.
        ttft_s: Seconds to the first logits.
        load_s: Seconds of loading.
    """

    estimate: Estimate
    load_plan: LoadPlan
    blend: Blend
    ttft_s: float
    load_s: float

    @classmethod
    def of(cls, estimate: Estimate, load_plan: LoadPlan) -> Timed:
        """Return a plan with its times; those of full prefill where it reads nothing."""
        blend = blend_of(load_plan)
        if not load_plan.fetches:
            return cls(estimate, load_plan, blend, estimate.prefill_s(len(load_plan.prompt)), 0.0)
        return cls(estimate, load_plan, blend, 0.0, 0.0).in_best_steps()

    def in_best_steps(self) -> Timed:
        """Return the plan with the number of layers per read that gives the fastest first token at its ratio."""
        estimate, fetches = self.estimate, self.load_plan.fetches
        if not fetches:
            return self
        count = _layers_a_read(estimate, self.blend, fetches)
        ttft_s, load_s = estimate.ttft_s(self.blend, fetches, count), sum(estimate.steps_s(fetches, count))
        return replace(self, load_plan=replace(self.load_plan, layers_a_read=count), ttft_s=ttft_s, load_s=load_s)

    def at(self, ratio: float) -> Timed:
        """Return the plan at another ratio, with the same number of layers per read."""
        if ratio == self.load_plan.ratio:
            return self
        blend = replace(self.blend, ratio=ratio)
        ttft_s = self.estimate.ttft_s(blend, self.load_plan.fetches, self.load_plan.layers_a_read)
        return replace(self, load_plan=replace(self.load_plan, ratio=ratio), blend=blend, ttft_s=ttft_s)

    @property
    def full_s(self) -> float:
        """Seconds of a full prefill of the prompt."""
        return self.estimate.prefill_s(len(self.load_plan.prompt))

    @property
    def is_loading(self) -> bool:
        """Whether the first token waits for loading rather than for computing."""
        return self.load_s > 0 and self.ttft_s > (1 + TIE) * self.estimate.fused_s(self.blend)


def _layers_a_read(estimate: Estimate, blend: Blend, fetches: Sequence[Fetch]) -> int:
    """Return the layers per read that give the fastest first token: fewer overlap better, more need fewer reads."""
    counts = [estimate.count(fetches)]
    while counts[-1] > 1 and estimate.is_ahead(fetches):
        counts.append(counts[-1] // 2)
    return min(counts, key=lambda count: estimate.ttft_s(blend, fetches, count))


def widest(timed: Timed, deadline_s: float | None = None) -> tuple[float, Bound]:
    """Return the largest ratio whose extra compute hides behind loading, and what bounds it (CacheBlend 5.1).

    It is at least the plan's own ratio. Compute is hidden if the first token comes no later than within `TIE`, and only
    where there is loading to hide it.
    """
    min_ratio = timed.load_plan.ratio
    hidden_s = timed.ttft_s + TIE * min(timed.ttft_s, timed.load_s)
    if not (0 < min_ratio < 1 and timed.blend.candidate_rows and timed.load_plan.cost.is_adjustable):
        return min_ratio, "floor"
    ratio = _largest(timed, hidden_s)
    if deadline_s is not None and timed.at(ratio).ttft_s > deadline_s:
        return _largest(timed, deadline_s), "deadline"
    return ratio, "loading" if ratio > min_ratio else "floor"


def _largest(timed: Timed, within_s: float) -> float:
    """Return the largest ratio, in hundredths, whose first logits come in time; at least the plan's own ratio."""
    min_ratio = timed.load_plan.ratio
    low, high = floor(100 * min_ratio), 100
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if timed.at(middle / 100).ttft_s <= within_s else (low, middle - 1)
    return max(min_ratio, low / 100)


def _at_levels(
    estimate: Estimate, options: ReadOptions, replan: Callable[[Mapping[int, Fetch]], LoadPlan]
) -> tuple[Mapping[int, Fetch], Timed]:
    """Return tier and level for each segment, and the plan with them: the least lossy unless others are much faster."""
    ways, fastest_ways = {at: found[0] for at, found in options.items()}, fastest(estimate, options)
    timed = Timed.of(estimate, replan(ways))
    if ways == fastest_ways:
        return ways, timed
    limit_s = (1 + MIN_GAIN) * Timed.of(estimate, replan(fastest_ways)).ttft_s
    while timed.ttft_s > limit_s and (faster := lossier(estimate, options, ways)) is not None:
        tried = Timed.of(estimate, replan(faster))
        if tried.ttft_s >= timed.ttft_s:
            break
        ways, timed = faster, tried
    return ways, timed


def _without_slow(timed: Timed, without: Callable[[Mapping[int, str]], LoadPlan]) -> Timed:
    """Drop segments that take longer to load than to compute, slowest first, while that makes the plan faster.

    One segment stays, so that there is something to fuse; whether full prefill is faster is decided elsewhere.
    """
    segments, estimate, skipped = timed.load_plan.prompt.segments, timed.estimate, dict[int, str]()
    load_times = {fetch.segment: estimate.fetch_s(fetch) for fetch in timed.load_plan.fetches}
    for at in sorted(load_times, key=lambda at: load_times[at] / len(segments[at].tokens), reverse=True)[:-1]:
        tried = Timed.of(estimate, without({**skipped, at: SLOWER}))
        compute_s = estimate.rows_s(tried.blend, 0, len(segments[at].tokens))
        if compute_s >= load_times[at] or tried.ttft_s >= timed.ttft_s:
            break
        timed, skipped[at] = tried, SLOWER
    return timed


def _forecast(timed: Timed, bound: Bound, deadline_s: float | None) -> Forecast:
    """Return the predicted times of a plan, in total and per segment."""
    estimate, load_plan, blend, full_s = timed.estimate, timed.load_plan, timed.blend, timed.full_s
    if not load_plan.fetches:
        return Forecast(0.0, full_s, full_s, full_s, bound, deadline_s)
    sizes = [len(segment.tokens) for segment in load_plan.prompt.segments]
    segments = [(index, 0.0, estimate.rows_s(blend, 0, sizes[index])) for index, _ in load_plan.misses]
    unread = {fetch.segment: estimate.fetch_s(fetch) for fetch in load_plan.unread}
    segments = [(index, unread.get(index, 0.0), seconds) for index, _, seconds in segments]
    for fetch in load_plan.fetches:
        recompute_s = estimate.rows_s(blend, sizes[fetch.segment], 0) if is_blended(load_plan.prompt, fetch) else 0.0
        segments.append((fetch.segment, estimate.fetch_s(fetch), recompute_s))
    computing_s = estimate.fused_s(blend)
    return Forecast(timed.load_s, computing_s, timed.ttft_s, full_s, bound, deadline_s, tuple(sorted(segments)))


def _in_full(load_plan: LoadPlan, fused_s: float) -> LoadPlan:
    """Return a full prefill in place of a plan that takes at least `fused_s`, with both times as the reason."""
    full_s = load_plan.forecast.full_s if load_plan.forecast is not None else 0.0
    unread = tuple(sorted((*load_plan.fetches, *load_plan.unread), key=lambda fetch: fetch.segment))
    misses = dict(load_plan.misses) | {fetch.segment: "full prefill is faster" for fetch in unread}
    why = f"full prefill {full_s:.3f} s is predicted, fusing {fused_s:.3f} s"
    return replace(load_plan.with_full_prefill(why), misses=tuple(sorted(misses.items())), unread=unread)
