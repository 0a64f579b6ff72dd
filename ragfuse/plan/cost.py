"""The cost model of one machine: seconds to read from each tier and to compute with one model.

A read takes a latency and a time per byte. A computed row takes a constant time and a time per
token of the prompt (attention). `load.timings` measures these costs, `Observed` corrects the costs
by the times of recent answers, and all planning decisions use the costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from math import exp, log
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.plan import Fetch, LoadPlan, Needs, PolicyCost, is_blended, watched_layers

COST_VERSION = 8
"""Version of `CostModel`. A stored `CostModel` of another version is ignored."""
HELD_UP_S = 3e-4
"""Seconds by which a read in another thread delays the model (measured on CPUs: 70 to 300 us)."""
AHEAD = 4
"""Maximum loaded layers that wait for fusing. A single read may wait even if it has more layers."""
STEP_NBYTES = 4 << 20
"""Maximum bytes of a chunk per read. A read has at least one layer, even if a layer is larger."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


def layers_a_read(nbytes: int, n_layers: int) -> int:
    """Return the maximum number of layers per read if the largest chunk has `nbytes` bytes."""
    return max(1, min(n_layers, STEP_NBYTES * n_layers // max(1, nbytes)))


def spans(n_layers: int, max_layers: int) -> list[tuple[int, int]]:
    """Return (first, end) of each read's layers. Reads have 1, 2, 4, ... layers up to `max_layers`.

    The first read is short because no computation hides it (CacheBlend 5.1). Each later read
    overlaps the fusing of the layers from the previous read.
    """
    sizes, n_left, size = list[int](), n_layers, 1
    while n_left > 0:
        sizes.append(min(size, max_layers, n_left))
        n_left, size = n_left - sizes[-1], 2 * size
    return list(pairwise(accumulate(sizes, initial=0)))


def room(max_layers: int) -> int:
    """Return how many reads of `max_layers` layers each may be loaded ahead of fusing."""
    return max(1, AHEAD // max_layers)


def pipelined_s(loads: Sequence[float], computes: Sequence[float], waiting: int) -> float:
    """Return the seconds to load and compute all steps, with one thread loading ahead.

    Args:
        loads: Seconds to load each step.
        computes: Seconds to compute each step after loading.
        waiting: Maximum number of loaded steps in the queue. The loading thread may hold one more
            loaded step (CacheBlend 5.1).
    """
    put, taken, done = 0.0, [0.0] * len(loads), 0.0
    for step, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        put = max(put + load, taken[step - waiting] if step >= waiting else 0.0)
        taken[step] = max(put, done)
        done = taken[step] + compute
    return done


@dataclass(frozen=True)
class Blend:
    """The row counts of one fused prefill, from which the seconds to compute are predicted.

    Args:
        cost: The cost of the selection policy.
        tokens: Number of tokens in the prompt.
        forced: Number of rows that must be computed, because no KV is loaded for these rows.
        candidate_rows: Number of cached rows from which the policy chooses.
        ratio: The share of candidate rows that the policy recomputes (`PolicyCost.share_of`).
    """

    cost: PolicyCost
    tokens: int
    forced: int
    candidate_rows: int
    ratio: float

    @classmethod
    def of(cls, plan: LoadPlan) -> Blend:
        """Return the row counts of a plan's fused prefill."""
        prompt = plan.prompt
        read = [
            (len(prompt.segments[fetch.segment].tokens), is_blended(prompt, fetch))
            for fetch in plan.fetches
        ]
        chunks = [n_tokens for n_tokens, blended in read if blended]
        forced = len(prompt) - sum(n_tokens for n_tokens, _ in read)
        return cls(
            plan.cost, len(prompt), forced, sum(chunks), plan.cost.share_of(plan.ratio, chunks)
        )

    @property
    def needs(self) -> Needs:
        """Input that the policy needs to choose rows. "nothing" if no row can be chosen."""
        return self.cost.needs if self.candidate_rows and self.ratio > 0 else "nothing"

    def rows(self, n_layers: int) -> float:
        """Return the mean number of rows computed per layer. Later layers may compute fewer."""
        whole = 1 / n_layers if self.needs == "all rows of a layer" else 0.0
        return self.forced + self.candidate_rows * (self.ratio * (1 - whole) + whole)

    def looked(self, n_layers: int) -> float:
        """Return the mean rows per layer in the extra attention pass; 0 without this pass."""
        return (
            self.forced * watched_layers(n_layers).stop / n_layers
            if self.needs == "attention"
            else 0.0
        )

    def features(self, n_layers: int) -> tuple[float, float, float, float]:
        """Return the multipliers of `fixed_s`, `row_s`, `key_s` and `CostModel.placed_s`."""
        rows = self.rows(n_layers) + self.looked(n_layers)
        return 1.0, rows, rows * self.tokens, self.tokens - self.forced


@dataclass(frozen=True)
class RowCost:
    """Seconds to compute rows of a prompt in all layers.

    Args:
        fixed_s: Seconds per prefill.
        row_s: Seconds per row.
        key_s: Seconds of attention per row and token of the prompt.
    """

    fixed_s: Seconds
    row_s: Seconds
    key_s: Seconds

    def rows_s(self, rows: float, tokens: int) -> float:
        """Return the seconds, without `fixed_s`, to compute rows of a prompt of `tokens` tokens."""
        return rows * (self.row_s + self.key_s * tokens)


@dataclass(frozen=True)
class TierCost:
    """Seconds to read entries from one tier.

    Args:
        read_s: Seconds per read of an entry (latency).
        byte_s: Seconds per byte.
        is_ahead: True if a thread reads this tier ahead of fusing.
    """

    read_s: Seconds
    byte_s: Seconds
    is_ahead: bool = True


@dataclass(frozen=True)
class CostModel:
    """The measured costs of one model on one machine.

    Args:
        model: The model's fingerprint.
        device: The device that was measured.
        threads: Number of compute threads.
        dtype: The model's dtype.
        n_layers: Number of layers of the model.
        prefill: The cost of a full prefill.
        fused: The cost of a fused prefill, without loading and copying cached KV.
        placed_s: Seconds to copy one cached row into the buffers. On an accelerator, this includes
            the transfer to the device.
        tiers: The cost of each measured tier, by name.
        prefill_points: (tokens, seconds) of each measured full prefill.
        decode: Seconds to decode one token's KV, by codec level. Level raw, which takes no time, is
            left out.
        packed: Encoded size relative to raw, by codec level. Level raw is left out.
        version: `COST_VERSION` when the costs were measured.
    """

    model: str
    device: str
    threads: Annotated[int, Field(ge=1)]
    dtype: str
    n_layers: Annotated[int, Field(ge=1)]
    prefill: RowCost
    fused: RowCost
    placed_s: Seconds = 0.0
    tiers: Mapping[str, TierCost] = field(default_factory=dict)
    prefill_points: tuple[tuple[Count, Seconds], ...] = ()
    decode: Mapping[str, Seconds] = field(default_factory=dict)
    packed: Mapping[str, Seconds] = field(default_factory=dict)
    version: int = COST_VERSION

    def as_dict(self) -> dict[str, Any]:
        """Return the cost model as plain JSON types."""
        return asdict(self)

    def knows(self, fetches: Sequence[Fetch]) -> bool:
        """Return whether the tiers and codec levels of all `fetches` were measured."""
        known = all(fetch.tier in self.tiers and self.knows_level(fetch.level) for fetch in fetches)
        return known and bool(self.tiers)

    def knows_level(self, level: str) -> bool:
        """Return True if decoding a codec level was measured, or if `level` is raw."""
        return level == LEVEL_NAMES[0] or level in self.decode

    # computing

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of a full prefill."""
        return self.prefill.fixed_s + self.prefill.rows_s(tokens, tokens)

    def recompute_s(self, ratio: float, tokens: int) -> float:
        """Return T_recompute of CacheBlend 5.1: `ratio` times a full prefill."""
        return ratio * self.prefill_s(tokens)

    def fused_s(self, blend: Blend) -> float:
        """Return the seconds of a fused prefill after all cached KV was loaded."""
        costs = self.fused.fixed_s, self.fused.row_s, self.fused.key_s, self.placed_s
        return sum(
            cost * times for cost, times in zip(costs, blend.features(self.n_layers), strict=True)
        )

    # reading

    def load_s(self, tier: str, nbytes: int) -> float:
        """Return T_load of CacheBlend 5.1: the seconds to read one entry from a measured tier."""
        n_reads = len(spans(self.n_layers, layers_a_read(nbytes, self.n_layers)))
        return self.tiers[tier].read_s * n_reads + self.tiers[tier].byte_s * nbytes

    def throughput(self, tier: str) -> float | None:
        """Return the bytes per second that a tier reads. None if the tier was not measured."""
        cost = self.tiers.get(tier)
        return 1 / cost.byte_s if cost is not None and cost.byte_s > 0 else None

    def decode_s(self, level: str, n_tokens: int) -> float:
        """Return the seconds to decode `n_tokens` at a codec level."""
        return self.decode.get(level, 0.0) * n_tokens

    def fetch_s(self, fetch: Fetch) -> float:
        """Return the seconds to read and decode the entry of one fetch."""
        return self.load_s(fetch.tier, fetch.nbytes) + self.decode_s(fetch.level, fetch.n_tokens)

    def stored_s(self, tier: str, level: str, raw_nbytes: int, n_tokens: int) -> float:
        """Return the seconds to load a chunk of `raw_nbytes` raw bytes, stored at `level`."""
        nbytes = round(raw_nbytes * self.packed.get(level, 1.0))
        return self.load_s(tier, nbytes) + self.decode_s(level, n_tokens)

    def counts(self, fetches: Sequence[Fetch]) -> list[int]:
        """Return the possible numbers of layers per read, largest first."""
        most = layers_a_read(max(fetch.nbytes for fetch in fetches), self.n_layers)
        is_ahead = any(self.tiers[fetch.tier].is_ahead for fetch in fetches)
        return [most >> halvings for halvings in range(most.bit_length())] if is_ahead else [most]

    def steps_s(self, fetches: Sequence[Fetch], count: int = 0) -> list[float]:
        """Return the seconds of each loading step. A step reads some layers of all fetches.

        `count` is the maximum number of layers in a step. If 0, the largest of `counts` is used.
        """
        count = count or self.counts(fetches)[0]
        read_s = sum(self.tiers[fetch.tier].read_s for fetch in fetches)
        rest_s = sum(self.tiers[fetch.tier].byte_s * fetch.nbytes for fetch in fetches)
        rest_s += sum(self.decode_s(fetch.level, fetch.n_tokens) for fetch in fetches)
        return [
            read_s + rest_s * (end - first) / self.n_layers
            for first, end in spans(self.n_layers, count)
        ]

    # loading and computing together

    def ttft_s(self, blend: Blend, fetches: Sequence[Fetch], count: int) -> float:
        """Return the seconds to the first logits, with loading and fusing overlapped.

        `count` is the maximum number of layers per read, one of `counts`. Each read in another
        thread delays the model. A policy that measures attention needs an extra first pass over
        three quarters of the layers, so these layers are loaded during that pass.
        """
        if not fetches:
            return self.prefill_s(blend.tokens)
        loads, compute_s = self.steps_s(fetches, count), self.fused_s(blend)
        if not any(self.tiers[fetch.tier].is_ahead for fetch in fetches):
            return sum(loads) + compute_s
        look_s = self.fused.rows_s(blend.looked(self.n_layers), blend.tokens)
        waiting = [(compute_s - look_s) / self.n_layers] * self.n_layers
        if look_s:  # the second pass can begin before the layers after `watched` are loaded
            watched = watched_layers(self.n_layers).stop
            second_s = sum(waiting[:watched])
            waiting[:watched] = [look_s / watched] * watched
            waiting[watched - 1] += second_s
        held_up_s = HELD_UP_S * len(fetches)
        computes = [
            sum(waiting[first:end]) + held_up_s for first, end in spans(self.n_layers, count)
        ]
        return pipelined_s(loads, computes, room(count))


READINGS = 5
"""Number of latest readings per tier. The median is used, so one or two outliers do not matter."""
INITIAL_READINGS = (1.0, 1.0)
"""Assumed readings before a tier's first reading. Three real readings that agree outvote both."""
MAX_CORRECTION = 20.0
"""Maximum factor by which a tier is assumed to be slower or faster than in `Observed.measured`."""
MIN_CORRECTION = 1.25
"""Minimum factor by which a tier must be slower or faster for `measured` to be corrected."""
MIN_TIER_SHARE = 0.2
"""A tier gets a reading if it has at least this share of a plan's predicted loading time."""
MIN_LOAD_S = 1e-3
"""Tiers get no reading if predicted and actual loading both take less than these seconds."""
MIN_PREFILL_ROWS = 64
"""A prefill's time per row is used only if the prefill computes at least this many rows."""


@dataclass(frozen=True)
class Observed:
    """The measured costs of a machine, and readings from recent answers that correct the costs.

    Args:
        measured: The costs from `ragfuse measure`. None if this machine was not measured.
        tiers: The latest readings of each tier, oldest first. A reading is the actual loading time
            divided by the loading time that `measured` predicts.
        rows: Seconds per computed row in each of the latest prefills, oldest first.
    """

    measured: CostModel | None = None
    tiers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rows: tuple[float, ...] = ()

    def times(self, tier: str) -> float:
        """Return how many times slower a tier is than in `measured`, by the latest readings."""
        return exp(median(log(reading) for reading in self.tiers.get(tier, INITIAL_READINGS)))

    def loaded(self, plan: LoadPlan, load_s: float) -> Observed:
        """Return a copy with the readings of a plan whose loading took `load_s` seconds.

        If the plan loaded from several tiers, all tiers are corrected by the same factor. A tier
        that the plan left unread moves back towards the measured speed, so that later plans try
        the tier again.
        """
        measured = self.measured
        if measured is None:
            return self
        read = {fetch.tier for fetch in plan.fetches} & measured.tiers.keys()
        shares = {tier: [fetch for fetch in plan.fetches if fetch.tier == tier] for tier in read}
        predicted = {
            tier: self.times(tier) * sum(measured.steps_s(share, plan.layers_a_read))
            for tier, share in shares.items()
        }
        total_s = sum(predicted.values())
        noted = {fetch.tier: 1.0 for fetch in plan.unread if fetch.tier in self.tiers}
        if total_s > 0 and max(load_s, total_s) >= MIN_LOAD_S:
            telling = (
                tier for tier, seconds in predicted.items() if seconds >= MIN_TIER_SHARE * total_s
            )
            noted |= {tier: self.times(tier) * load_s / total_s for tier in telling}
        found = dict(self.tiers)
        for tier, times in noted.items():
            bounded = min(max(times, 1 / MAX_CORRECTION), MAX_CORRECTION)
            found[tier] = (*found.get(tier, INITIAL_READINGS), bounded)[-READINGS:]
        return replace(self, tiers=found)

    def computed(self, plan: LoadPlan, n_layers: int, seconds: float) -> Observed:
        """Return a copy with the time per row of a prefill that took `seconds`."""
        rows = Blend.of(plan).rows(n_layers) if plan.fetches else len(plan.prompt)
        return (
            replace(self, rows=(*self.rows, seconds / rows)[-READINGS:])
            if rows >= MIN_PREFILL_ROWS
            else self
        )

    def applied(self, n_layers: int) -> CostModel | None:
        """Return the current costs: `measured` with corrected tiers.

        On an unmeasured machine without `rows`, the result is None. With `rows`, the result has no
        tiers, and a row costs the minimum of `rows`, the time that other programs increased least.
        """
        if self.measured is not None:
            tiers = dict(self.measured.tiers)
            for name in tiers.keys() & self.tiers:
                tier, times = tiers[name], self.times(name)
                if not 1 / MIN_CORRECTION < times < MIN_CORRECTION:
                    tiers[name] = replace(
                        tier, read_s=tier.read_s * times, byte_s=tier.byte_s * times
                    )
            return replace(self.measured, tiers=tiers)
        if not self.rows:
            return None
        row = RowCost(0.0, min(self.rows), 0.0)
        return CostModel("", "", 1, "", n_layers, row, row)
