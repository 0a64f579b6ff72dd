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
from ragfuse.plan.levels import WORTH, Offers, coarser, finest, offers, soonest
from ragfuse.plan.observed import corrected
from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.kv import Entry
from ragfuse.types.plan import Bound, Fetch, Forecast, LoadPlan
from ragfuse.types.policy_cost import CostOf
from ragfuse.types.profiles import MachineProfile
from ragfuse.types.prompt import Prompt, Segment
from ragfuse.types.reasons import MISSING, UNREADABLE

AUTO = "auto"
"""The policy name that stands for the calibrated policy where it applies, else for `MEASURED`."""
MEASURED = ("hkvd", 0.15)
"""Policy and ratio for chunks that were not encoded after filler text, and for models that are not calibrated
(CacheBlend 4.3)."""

TIE = 0.02
"""Plans whose times to the first token differ by less than this share count as equally fast."""
SLOWER = "slower to load than to compute"
NO_WAYS: Mapping[int, str] = MappingProxyType({})
AS_FOUND: Mapping[int, Fetch] = MappingProxyType({})
NO_COPIES: Mapping[ChunkKey, list[Entry]] = MappingProxyType({})


def plan(
    prompt: Prompt,
    entries: Mapping[ChunkKey, Entry],
    policy: str = AUTO,
    ratio: float | None = None,
    lost: frozenset[int] = frozenset(),
    choice: tuple[str, float] | None = None,
    left: Mapping[int, str] = NO_WAYS,
    ways: Mapping[int, Fetch] = AS_FOUND,
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
        choice: Policy and ratio that calibration chose, which "auto" uses if all chunks were encoded after filler text.
        left: Segments to recompute although they are in the store, with the reason.
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
            misses.append((index, f"its entry holds {entry.n_tokens} tokens"))
        elif not entry.nbytes:
            misses.append((index, "its entry holds nothing"))
        else:
            level, nbytes = next(iter(entry.sizes.items()))
            found = Fetch(index, entry.key, entry.tier, level, nbytes, entry.n_tokens, tuple(entry.sizes.items()))
            fetch = ways.get(index, found)
            (unread if index in left else fetches).append(fetch)
            misses += [(index, left[index])] if index in left else []
    fetches = list(_once(fetches))
    blended = [fetch for fetch in fetches if is_blended(prompt, fetch)]
    all_behind_filler = bool(blended) and all(f.key.encoded == "filler" for f in blended)
    settled = settle(policy, ratio, choice if all_behind_filler else None)
    name, share = settled
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
        choice: Policy and ratio for "auto"; None: the conservative `MEASURED`.
    """
    chosen = choice if choice is not None and policy == AUTO else MEASURED
    return chosen[0] if policy == AUTO else policy, chosen[1] if ratio is None else ratio


def is_blended(prompt: Prompt, fetch: Fetch) -> bool:
    """Return whether a policy may choose rows of a fetched segment to recompute."""
    return prompt.segments[fetch.segment].kind == "chunk" and not is_exact(prompt, fetch)


def is_exact(prompt: Prompt, fetch: Fetch) -> bool:
    """Return whether a fetched segment attended to exactly the tokens before it here, so that its KV equals full
    prefill's."""
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


def blend_of(found: LoadPlan) -> Blend:
    """Return the row counts of a plan's fused prefill, from which its time is estimated."""
    prompt = found.prompt
    sizes = [len(prompt.segments[fetch.segment].tokens) for fetch in found.fetches]
    chunks = [n for n, fetch in zip(sizes, found.fetches, strict=True) if is_blended(prompt, fetch)]
    share = found.cost.share_of(found.ratio, chunks)
    return Blend(found.cost, len(prompt), len(prompt) - sum(sizes), sum(chunks), share)


@dataclass(frozen=True)
class LoadingController:
    """Plans prompts by predicted times on a measured machine, and as `plan` does on any other.

    A policy or ratio that the caller names is kept: then no chunk is left unread and no full prefill chosen to save
    time, and the plan only predicts.

    Args:
        cost_of: The costs of policies by name.
        machine: Timings of this machine; None: not measured.
        choice: Policy and ratio that calibration chose, for "auto".
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
        computing, see `plan.levels`.

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
        found = plan(prompt, entries, policy, ratio, lost, self.choice, cost_of=self.cost_of)
        if self.machine is None or not Estimate(self.machine).knows(found.fetches):
            return found

        def again(ways: Mapping[int, Fetch], left: Mapping[int, str] = NO_WAYS) -> LoadPlan:
            return plan(prompt, entries, policy, ratio, lost, self.choice, left, ways, cost_of=self.cost_of)

        times = Estimate(corrected(self.machine, self.corrections))
        ways, timed = _at_levels(times, offers(times, found.fetches, entries, others), again)
        asked = policy != AUTO or ratio is not None
        if not asked and timed.is_loading:
            timed = _without_slow(timed, partial(again, ways))
        base_s = timed.ttft_s
        chosen: tuple[float, Bound] = (ratio, "asked") if ratio is not None else widest(timed, deadline_s)
        timed = timed.at(chosen[0]).in_best_steps()
        forecast = _forecast(timed, chosen[1], deadline_s)
        tiers = {fetch.tier for fetch in (*timed.found.fetches, *timed.found.unread)}
        there = tuple((tier, times) for tier, times in sorted(self.corrections.items()) if tier in tiers)
        foretold = replace(timed.found, forecast=replace(forecast, corrections=there))
        return foretold if asked or not found.fetches or base_s < timed.full_s else _in_full(foretold, base_s)


@dataclass(frozen=True)
class Timed:
    """A plan with its predicted times.

    Args:
        times: The estimate for this machine.
        found: The plan.
        blend: Its fused prefill in row counts.
        ttft_s: Seconds to the first logits.
        load_s: Seconds of loading.
    """

    times: Estimate
    found: LoadPlan
    blend: Blend
    ttft_s: float
    load_s: float

    @classmethod
    def of(cls, times: Estimate, found: LoadPlan) -> Timed:
        """Return a plan with its times; those of full prefill where it reads nothing."""
        blend = blend_of(found)
        if not found.fetches:
            return cls(times, found, blend, times.prefill_s(len(found.prompt)), 0.0)
        return cls(times, found, blend, 0.0, 0.0).in_best_steps()

    def in_best_steps(self) -> Timed:
        """Return the plan with the number of layers per read that gives the fastest first token at its ratio."""
        times, fetches = self.times, self.found.fetches
        if not fetches:
            return self
        count = _layers_a_read(times, self.blend, fetches)
        ttft_s, load_s = times.ttft_s(self.blend, fetches, count), sum(times.steps_s(fetches, count))
        return replace(self, found=replace(self.found, layers_a_read=count), ttft_s=ttft_s, load_s=load_s)

    def at(self, ratio: float) -> Timed:
        """Return the plan at another ratio, with the same number of layers per read."""
        if ratio == self.found.ratio:
            return self
        blend = replace(self.blend, ratio=ratio)
        ttft_s = self.times.ttft_s(blend, self.found.fetches, self.found.layers_a_read)
        return replace(self, found=replace(self.found, ratio=ratio), blend=blend, ttft_s=ttft_s)

    @property
    def full_s(self) -> float:
        """Seconds of a full prefill of the prompt."""
        return self.times.prefill_s(len(self.found.prompt))

    @property
    def is_loading(self) -> bool:
        """Whether the first token waits for loading rather than for computing."""
        return self.load_s > 0 and self.ttft_s > (1 + TIE) * self.times.fused_s(self.blend)


def _layers_a_read(times: Estimate, blend: Blend, fetches: Sequence[Fetch]) -> int:
    """Return the layers per read that give the fastest first token: fewer overlap better, more need fewer reads."""
    counts = [times.count(fetches)]
    while counts[-1] > 1 and times.is_ahead(fetches):
        counts.append(counts[-1] // 2)
    return min(counts, key=lambda count: times.ttft_s(blend, fetches, count))


def widest(timed: Timed, deadline_s: float | None = None) -> tuple[float, Bound]:
    """Return the largest ratio whose extra compute hides behind loading, and what bounds it (CacheBlend 5.1).

    It is at least the plan's own ratio. Compute is hidden if the first token comes no later than within `TIE`, and only
    where there is loading to hide it.
    """
    least = timed.found.ratio
    hidden_s = timed.ttft_s + TIE * min(timed.ttft_s, timed.load_s)
    if not (0 < least < 1 and timed.blend.candidate_rows and timed.found.cost.is_adjustable):
        return least, "floor"
    ratio = _largest(timed, hidden_s)
    if deadline_s is not None and timed.at(ratio).ttft_s > deadline_s:
        return _largest(timed, deadline_s), "deadline"
    return ratio, "loading" if ratio > least else "floor"


def _largest(timed: Timed, within_s: float) -> float:
    """Return the largest ratio, in hundredths, whose first logits come in time; at least the plan's own ratio."""
    least = timed.found.ratio
    low, high = floor(100 * least), 100
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if timed.at(middle / 100).ttft_s <= within_s else (low, middle - 1)
    return max(least, low / 100)


def _at_levels(
    times: Estimate, offers: Offers, again: Callable[[Mapping[int, Fetch]], LoadPlan]
) -> tuple[Mapping[int, Fetch], Timed]:
    """Return tier and level for each segment, and the plan with them: the least lossy unless others are much faster."""
    ways, quick = finest(offers), soonest(times, offers)
    timed = Timed.of(times, again(ways))
    if ways == quick:
        return ways, timed
    enough_s = (1 + WORTH) * Timed.of(times, again(quick)).ttft_s
    while timed.ttft_s > enough_s and (sooner := coarser(times, offers, ways)) is not None:
        tried = Timed.of(times, again(sooner))
        if tried.ttft_s >= timed.ttft_s:
            break
        ways, timed = sooner, tried
    return ways, timed


def _without_slow(timed: Timed, without: Callable[[Mapping[int, str]], LoadPlan]) -> Timed:
    """Drop segments that take longer to load than to compute, slowest first, while that makes the plan faster.

    One segment stays, so that there is something to fuse; whether full prefill is faster is decided elsewhere.
    """
    segments, times, left = timed.found.prompt.segments, timed.times, dict[int, str]()
    loads = {fetch.segment: times.fetch_s(fetch) for fetch in timed.found.fetches}
    for at in sorted(loads, key=lambda at: loads[at] / len(segments[at].tokens), reverse=True)[:-1]:
        tried = Timed.of(times, without({**left, at: SLOWER}))
        compute_s = times.rows_s(tried.blend, 0, len(segments[at].tokens))
        if compute_s >= loads[at] or tried.ttft_s >= timed.ttft_s:
            break
        timed, left[at] = tried, SLOWER
    return timed


def _forecast(timed: Timed, bound: Bound, deadline_s: float | None) -> Forecast:
    """Return the predicted times of a plan, in total and per segment."""
    times, found, blend, full_s = timed.times, timed.found, timed.blend, timed.full_s
    if not found.fetches:
        return Forecast(0.0, full_s, full_s, full_s, bound, deadline_s)
    sizes = [len(segment.tokens) for segment in found.prompt.segments]
    each = [(index, 0.0, times.rows_s(blend, 0, sizes[index])) for index, _ in found.misses]
    unread = {fetch.segment: times.fetch_s(fetch) for fetch in found.unread}
    each = [(index, unread.get(index, 0.0), seconds) for index, _, seconds in each]
    for fetch in found.fetches:
        again_s = times.rows_s(blend, sizes[fetch.segment], 0) if is_blended(found.prompt, fetch) else 0.0
        each.append((fetch.segment, times.fetch_s(fetch), again_s))
    computing_s = times.fused_s(blend)
    return Forecast(timed.load_s, computing_s, timed.ttft_s, full_s, bound, deadline_s, tuple(sorted(each)))


def _in_full(found: LoadPlan, fused_s: float) -> LoadPlan:
    """Return a full prefill in place of a plan that takes at least `fused_s`, with both times as the reason."""
    full_s = found.forecast.full_s if found.forecast is not None else 0.0
    unread = tuple(sorted((*found.fetches, *found.unread), key=lambda fetch: fetch.segment))
    misses = dict(found.misses) | {fetch.segment: "full prefill is faster" for fetch in unread}
    why = f"full prefill {full_s:.3f} s is predicted, fusing {fused_s:.3f} s"
    return replace(found.with_full_prefill(why), misses=tuple(sorted(misses.items())), unread=unread)
