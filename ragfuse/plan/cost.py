"""The cost model of one machine: seconds to read from its tiers and to compute with one model.

A read costs a latency and a time per byte. A computed row costs a constant and a time per token
that it attends to. `load.timings` measures these numbers, `Observed` corrects them by the times of
recent answers, and all planning decisions use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import exp, log
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.plan import Fetch, LoadPlan, Needs, PolicyCost, is_blended, watched_layers

COST_VERSION = 8
"""Version of `CostModel`; models of another version are ignored."""
HELD_UP_S = 3e-4
"""Seconds by which a read in another thread delays the model; 70 to 300 us on CPUs."""
AHEAD = 4
"""Maximum layers read ahead of fusing; at least those of one read."""
STEP_NBYTES = 4 << 20
"""Maximum bytes of a chunk per read; at least one layer."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


def layers_a_read(nbytes: int, n_layers: int) -> int:
    """Return the maximum layers per read if the largest chunk has `nbytes`."""
    return max(1, min(n_layers, STEP_NBYTES * n_layers // max(1, nbytes)))


def spans(n_layers: int, max_layers: int) -> list[tuple[int, int]]:
    """Return the layers first:end of each read: 1, 2, 4, ..., at most `max_layers` at a time.

    Nothing hides the first read (CacheBlend 5.1). Each later read overlaps the fusing of the
    previous one's layers.
    """
    sizes, n_left, size = list[int](), n_layers, 1
    while n_left > 0:
        sizes.append(min(size, max_layers, n_left))
        n_left, size = n_left - sizes[-1], 2 * size
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def room(max_layers: int) -> int:
    """Return the number of reads of `max_layers` layers that may be queued for fusing."""
    return max(1, AHEAD // max_layers)


def pipelined_s(loads: Sequence[float], computes: Sequence[float], waiting: int) -> float:
    """Return the time at which the last step is computed, with one thread loading ahead.

    Args:
        loads: Seconds to load each step.
        computes: Seconds to compute each step, once it is loaded.
        waiting: Maximum queue of loaded steps; the loading thread holds one more (CacheBlend 5.1).
    """
    put, taken, done = 0.0, [0.0] * len(loads), 0.0
    for step, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        put = max(put + load, taken[step - waiting] if step >= waiting else 0.0)
        taken[step] = max(put, done)
        done = taken[step] + compute
    return done


@dataclass(frozen=True)
class Blend:
    """The row counts of one fused prefill.

    Args:
        cost: The cost of its policy.
        tokens: Tokens of the prompt.
        forced: Rows that must be computed, because none of their KV is loaded.
        candidate_rows: Cached rows among which the policy chooses.
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
        """Input of the policy's choice; "nothing" if there is nothing to choose."""
        return self.cost.needs if self.candidate_rows and self.ratio > 0 else "nothing"

    def rows(self, n_layers: int) -> float:
        """Return the mean rows per layer; gradual policies have the same mean (CacheBlend 4.3)."""
        whole = 1 / n_layers if self.needs == "all rows of a layer" else 0.0
        return self.forced + self.candidate_rows * (self.ratio * (1 - whole) + whole)

    def looked(self, n_layers: int) -> float:
        """Return the mean rows per layer in the first pass of an attention policy."""
        return (
            self.forced * watched_layers(n_layers).stop / n_layers
            if self.needs == "attention"
            else 0.0
        )

    def features(self, n_layers: int) -> tuple[float, float, float, float]:
        """Return the factors of `fixed_s`, `row_s`, `key_s` and `CostModel.placed_s`."""
        rows = self.rows(n_layers) + self.looked(n_layers)
        return 1.0, rows, rows * self.tokens, self.tokens - self.forced


@dataclass(frozen=True)
class RowCost:
    """Seconds to compute rows in all layers.

    Args:
        fixed_s: Per prefill.
        row_s: Per row.
        key_s: Per row and token of its prompt (attention).
    """

    fixed_s: Seconds
    row_s: Seconds
    key_s: Seconds

    def rows_s(self, rows: float, tokens: int) -> float:
        """Return the seconds to compute `rows` of a prompt of `tokens` tokens, less `fixed_s`."""
        return rows * (self.row_s + self.key_s * tokens)


@dataclass(frozen=True)
class TierCost:
    """Seconds to read entries from one tier.

    Args:
        read_s: Per read of an entry.
        byte_s: Per byte.
        is_ahead: True if a thread reads this tier ahead of fusing.
    """

    read_s: Seconds
    byte_s: Seconds
    is_ahead: bool = True


@dataclass(frozen=True)
class CostModel:
    """The costs of one model on one machine: measurements, and parameters fitted to them.

    Args:
        model: The model's fingerprint.
        device: The device that was measured.
        threads: Compute threads.
        dtype: The model's dtype.
        n_layers: The model's layers.
        prefill: The cost of a full prefill.
        fused: The cost of a fused prefill whose cached KV is loaded.
        placed_s: Seconds per cached row to copy it into the buffers; on an accelerator, including
            the transfer.
        tiers: The cost of each measured tier, by name.
        prefill_points: (tokens, seconds) of full prefills.
        decode: Seconds to decode one token's KV, by codec level; raw is left out, as it takes none.
        packed: Size relative to raw, by codec level; raw is left out.
        version: `COST_VERSION` when it was written.
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
        """Return the model in plain JSON types."""
        return asdict(self)

    def knows(self, fetches: Sequence[Fetch]) -> bool:
        """Return whether all tiers and levels of these fetches were measured."""
        known = all(fetch.tier in self.tiers and self.knows_level(fetch.level) for fetch in fetches)
        return known and bool(self.tiers)

    def knows_level(self, level: str) -> bool:
        """Return whether decoding of this level was measured; raw needs none."""
        return level == LEVEL_NAMES[0] or level in self.decode

    # computing

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of a full prefill."""
        return self.prefill.fixed_s + self.prefill.rows_s(tokens, tokens)

    def recompute_s(self, ratio: float, tokens: int) -> float:
        """Return T_recompute of CacheBlend 5.1: `ratio` times a full prefill."""
        return ratio * self.prefill_s(tokens)

    def fused_s(self, blend: Blend) -> float:
        """Return the seconds of a fused prefill with its cached KV already loaded."""
        costs = self.fused.fixed_s, self.fused.row_s, self.fused.key_s, self.placed_s
        return sum(
            cost * times for cost, times in zip(costs, blend.features(self.n_layers), strict=True)
        )

    def rows_s(self, blend: Blend, candidate_rows: int, forced: int) -> float:
        """Return the compute seconds that these rows add to a fused prefill."""
        without = replace(
            blend,
            candidate_rows=blend.candidate_rows - candidate_rows,
            forced=blend.forced - forced,
        )
        return max(0.0, self.fused_s(blend) - self.fused_s(without))

    # reading

    def load_s(self, tier: str, nbytes: int) -> float:
        """Return T_load of CacheBlend 5.1: the seconds to read one entry of a measured tier."""
        n_reads = len(spans(self.n_layers, layers_a_read(nbytes, self.n_layers)))
        return self.tiers[tier].read_s * n_reads + self.tiers[tier].byte_s * nbytes

    def throughput(self, tier: str) -> float | None:
        """Return the bytes per second of a tier; None if it was not measured."""
        cost = self.tiers.get(tier)
        return 1 / cost.byte_s if cost is not None and cost.byte_s > 0 else None

    def decode_s(self, level: str, n_tokens: int) -> float:
        """Return the seconds to decode `n_tokens` at a level."""
        return self.decode.get(level, 0.0) * n_tokens

    def fetch_s(self, fetch: Fetch) -> float:
        """Return the seconds to read and decode one segment."""
        return self.load_s(fetch.tier, fetch.nbytes) + self.decode_s(fetch.level, fetch.n_tokens)

    def stored_s(self, tier: str, level: str, raw_nbytes: int, n_tokens: int) -> float:
        """Return the seconds to load a chunk of `raw_nbytes` from a tier at a level."""
        nbytes = round(raw_nbytes * self.packed.get(level, 1.0))
        return self.load_s(tier, nbytes) + self.decode_s(level, n_tokens)

    def counts(self, fetches: Sequence[Fetch]) -> list[int]:
        """Return the possible layers per read, largest first. Smaller ones overlap better."""
        most = layers_a_read(max(fetch.nbytes for fetch in fetches), self.n_layers)
        is_ahead = any(self.tiers[fetch.tier].is_ahead for fetch in fetches)
        return [most >> halvings for halvings in range(most.bit_length())] if is_ahead else [most]

    def steps_s(self, fetches: Sequence[Fetch], count: int = 0) -> list[float]:
        """Return the seconds of each loading step, `count` layers (0: the maximum) per chunk."""
        count = count or self.counts(fetches)[0]
        read_s = sum(self.tiers[fetch.tier].read_s for fetch in fetches)
        rest_s = sum(self.tiers[fetch.tier].byte_s * fetch.nbytes for fetch in fetches)
        rest_s += sum(self.decode_s(fetch.level, fetch.n_tokens) for fetch in fetches)
        return [
            read_s + rest_s * (end - first) / self.n_layers
            for first, end in spans(self.n_layers, count)
        ]

    # loading and computing together

    def ttft_s(self, blend: Blend, fetches: Sequence[Fetch], count: int = 0) -> float:
        """Return the seconds to the first logits, with loading and fusing overlapped.

        `count` is the layers per read (0: the maximum). Each read in another thread delays the
        model. An attention policy loads three quarters of the layers during its first pass.
        """
        if not fetches:
            return self.prefill_s(blend.tokens)
        count = count or self.counts(fetches)[0]
        loads, compute_s = self.steps_s(fetches, count), self.fused_s(blend)
        if not any(self.tiers[fetch.tier].is_ahead for fetch in fetches):
            return sum(loads) + compute_s
        look_s = self.fused.rows_s(blend.looked(self.n_layers), blend.tokens)
        waiting = [(compute_s - look_s) / self.n_layers] * self.n_layers
        if look_s:  # the second pass begins before it needs the layers after the watched ones
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
"""Number of latest readings whose median counts, so that one or two outliers have no effect."""
INITIAL_READINGS = (1.0, 1.0)
"""Assumed readings of a tier without any; three consistent readings outvote them."""
MAX_CORRECTION = 20.0
"""Maximum factor by which a tier is assumed slower or faster than measured."""
MIN_CORRECTION = 1.25
"""Minimum factor by which a tier must be slower or faster than measured to be corrected."""
MIN_TIER_SHARE = 0.2
"""Minimum share of the predicted loading time that a tier needs to be corrected by it."""
MIN_LOAD_S = 1e-3
"""Minimum seconds of loading, predicted or actual, that correct a tier."""
MIN_PREFILL_ROWS = 64
"""Minimum rows of a prefill from which the time per row is inferred."""


@dataclass(frozen=True)
class Observed:
    """The measured costs of a machine, and the readings of recent answers.

    Args:
        measured: The measured costs; None: not measured.
        tiers: Latest readings by tier, oldest first: actual seconds divided by measured ones.
        rows: Seconds per computed row of the latest prefills, oldest first.
    """

    measured: CostModel | None = None
    tiers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rows: tuple[float, ...] = ()

    def times(self, tier: str) -> float:
        """Return the factor by which a tier is slower than measured, from its latest readings."""
        return exp(median(log(reading) for reading in self.tiers.get(tier, INITIAL_READINGS)))

    def loaded(self, plan: LoadPlan, load_s: float) -> Observed:
        """Return the state after a plan whose loading took `load_s` seconds.

        If it loaded from several tiers, all are corrected by the same factor. A tier that the plan
        left unread moves back towards its measured speed, so that a once slow tier is tried again.
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
        """Return the state after a prefill that took `seconds`."""
        rows = Blend.of(plan).rows(n_layers) if plan.fetches else len(plan.prompt)
        return (
            replace(self, rows=(*self.rows, seconds / rows)[-READINGS:])
            if rows >= MIN_PREFILL_ROWS
            else self
        )

    def applied(self, n_layers: int) -> CostModel | None:
        """Return the current costs: the measured ones with corrected tiers.

        On an unmeasured machine the result has no tiers, and its cost per row is the minimum of the
        latest readings, since other load only adds to them. None before the first reading.
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
