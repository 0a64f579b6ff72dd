"""Predicted times on a measured machine: full prefill, fused prefill, loading, and loading that overlaps fusing.

Arithmetic over a `MachineProfile`, in seconds. Nothing here decides, and nothing reads a clock, a file or a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from ragfuse.plan.steps import layers_a_read, room, spans, steps
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import Fetch
from ragfuse.types.policy_cost import Needs, PolicyCost, schedule, watched_layers
from ragfuse.types.profiles import FusedCost, MachineProfile

HELD_UP_S = 3e-4
"""Seconds by which one read in another thread delays the model: 70 to 300 us were seen on CPUs."""


@dataclass(frozen=True)
class Blend:
    """The row counts of one fused prefill, from which its time is estimated.

    Args:
        cost: The cost of its policy.
        tokens: Tokens of the prompt.
        forced: Rows that must be computed, because no KV of them is loaded.
        candidate_rows: Cached rows among which the policy chooses.
        ratio: The share of these that the policy recomputes, see `PolicyCost.share_of`.
    """

    cost: PolicyCost
    tokens: int
    forced: int
    candidate_rows: int
    ratio: float

    @property
    def needs(self) -> Needs:
        """What must be computed before the policy can choose; nothing where it has no choice."""
        return self.cost.needs if self.candidate_rows and self.ratio > 0 else "nothing"

    def rows(self, n_layers: int) -> list[float]:
        """Return the expected rows computed in each layer; a gradual policy follows CacheBlend 4.3."""
        first = 1 if self.needs == "all rows of a layer" else 0
        layers = range(first, n_layers)
        shares = [schedule(self.ratio, layer, first, n_layers, self.cost.gradual) for layer in layers]
        return [self.forced + each * self.candidate_rows for each in (*[1.0] * first, *shares)]


def features(blend: Blend, n_layers: int) -> tuple[float, ...]:
    """Return the multipliers of the fields of a `FusedCost`, in their order."""
    rows, needs = sum(blend.rows(n_layers)) / n_layers, blend.needs
    rows += blend.forced * watched_layers(n_layers).stop / n_layers if needs == "attention" else 0
    chosen = blend.tokens if needs != "nothing" else 0
    return 1.0, rows, rows * blend.tokens, blend.tokens - blend.forced, chosen


def fused_s(cost: FusedCost, blend: Blend, n_layers: int) -> float:
    """Return the seconds of a fused prefill whose cached KV is loaded."""
    return float(sum(each * times for each, times in zip(astuple(cost), features(blend, n_layers), strict=True)))


def layers_s(cost: FusedCost, blend: Blend, n_layers: int) -> tuple[list[float], list[float]]:
    """Return the seconds per layer of the attention pass and of the computing pass.

    The first ends behind the last of `watched_layers`; it is [] for policies without one.
    """
    row_s = (cost.row_s + cost.score_s * blend.tokens) / n_layers
    placed_s = cost.placed_s * (blend.tokens - blend.forced) / n_layers
    passes = [row_s * rows + cost.fixed_s / n_layers for rows in blend.rows(n_layers)]
    if blend.needs == "attention":
        watched = watched_layers(n_layers).stop
        look_s = row_s * blend.forced + cost.chosen_s * blend.tokens / watched
        later = [each + placed_s * (layer >= watched) for layer, each in enumerate(passes)]
        return [look_s + placed_s] * watched, later
    if blend.needs == "all rows of a layer":
        passes[min(1, n_layers - 1)] += cost.chosen_s * blend.tokens
    return [], [each + placed_s for each in passes]


def pipelined_s(loads: Sequence[float], computes: Sequence[float], waiting: int) -> float:
    """Return when the last step is computed, while one thread loads steps ahead (CacheBlend 5.1).

    Args:
        loads: Seconds to load each step.
        computes: Seconds to compute each step, once it is loaded.
        waiting: Loaded steps that may wait to be computed; the loading thread holds one more.
    """
    put, taken, done = 0.0, [0.0] * len(loads), 0.0
    for step, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        put = max(put + load, taken[step - waiting] if step >= waiting else 0.0)
        taken[step] = max(put, done)
        done = taken[step] + compute
    return done


@dataclass(frozen=True)
class Estimate:
    """Predicted times on a measured machine; all methods return seconds unless they say otherwise."""

    machine: MachineProfile

    def knows(self, fetches: Sequence[Fetch]) -> bool:
        """Return whether the tiers and levels of all these fetches were measured."""
        return all(fetch.tier in self.machine.tiers and self.knows_level(fetch.level) for fetch in fetches)

    def knows_level(self, level: str) -> bool:
        """Return whether decoding this level was measured; raw needs no decoding."""
        return level == LEVEL_NAMES[0] or level in self.machine.decode

    def prefill_s(self, tokens: int) -> float:
        """Return the time of a full prefill of `tokens`."""
        fixed, linear, square = self.machine.prefill
        return fixed + linear * tokens + square * tokens * tokens

    def recompute_s(self, ratio: float, tokens: int) -> float:
        """Return T_recompute of CacheBlend 5.1: `ratio` times a full prefill."""
        return ratio * self.prefill_s(tokens)

    def fused_s(self, blend: Blend) -> float:
        """Return the time of a fused prefill whose cached KV is loaded."""
        return fused_s(self.machine.fused, blend, self.machine.n_layers)

    def load_s(self, tier: str, nbytes: int, n_reads: int | None = None) -> float:
        """Return the time to read one entry of a measured tier.

        Args:
            tier: Name of the tier.
            nbytes: Bytes of the entry.
            n_reads: Reads it takes; None: as many as for a prompt of such entries.
        """
        speed, layers = self.machine.tiers[tier], self.machine.n_layers
        reads = len(steps(layers, layers_a_read(nbytes, layers))) if n_reads is None else n_reads
        return speed.read_s * reads + speed.byte_s * nbytes

    def throughput(self, tier: str) -> float | None:
        """Return the bytes per second that a tier gives; None where it was not measured."""
        speed = self.machine.tiers.get(tier)
        return 1 / speed.byte_s if speed is not None and speed.byte_s > 0 else None

    def decode_s(self, level: str, n_tokens: int) -> float:
        """Return the time to decode `n_tokens` of a level."""
        return self.machine.decode.get(level, 0.0) * n_tokens

    def fetch_s(self, fetch: Fetch) -> float:
        """Return the time to read and decode one segment."""
        return self.load_s(fetch.tier, fetch.nbytes) + self.decode_s(fetch.level, fetch.n_tokens)

    def stored_s(self, tier: str, level: str, raw_nbytes: int, n_tokens: int) -> float:
        """Return the time to load a chunk, of `raw_nbytes` as raw, from a measured tier at a measured level."""
        nbytes = round(raw_nbytes * self.machine.packed.get(level, 1.0))
        return self.load_s(tier, nbytes) + self.decode_s(level, n_tokens)

    def count(self, fetches: Sequence[Fetch], chosen: int = 0) -> int:
        """Return the most layers of each chunk per read: `chosen`, or the default of `load.layers` if that is 0."""
        layers = self.machine.n_layers
        return min(chosen, layers) or layers_a_read(max((fetch.nbytes for fetch in fetches), default=0), layers)

    def steps_s(self, fetches: Sequence[Fetch], chosen: int = 0) -> list[float]:
        """Return the time of each loading step: it reads and decodes some layers of every chunk, in one thread."""
        layers, tiers, count = self.machine.n_layers, self.machine.tiers, self.count(fetches, chosen)
        per_read = sum(tiers[fetch.tier].read_s for fetch in fetches)
        per_layer = sum(tiers[fetch.tier].byte_s * fetch.nbytes for fetch in fetches) / layers
        per_layer += sum(self.decode_s(fetch.level, fetch.n_tokens) for fetch in fetches) / layers
        return [per_read + per_layer * size for size in steps(layers, count)]

    def ttft_s(self, blend: Blend, fetches: Sequence[Fetch], chosen: int = 0) -> float:
        """Return the time to the first logits, where loading overlaps fusing as in `load.layers`.

        Each read in the loading thread delays the model a little. A policy with an attention pass loads three quarters
        of the layers during that pass, and the others before it computes them.
        """
        count, layers = self.count(fetches, chosen), self.machine.n_layers
        loads = self.steps_s(fetches, chosen)
        look, passes = layers_s(self.machine.fused, blend, layers)
        if not self.is_ahead(fetches):
            return sum(loads) + sum(look) + sum(passes)
        waiting = passes
        if look:  # the second pass begins before the layers behind the watched ones are needed
            watched = len(look)
            waiting = [*look[:-1], look[-1] + sum(passes[:watched]), *passes[watched:]]
        held_up_s = HELD_UP_S * len(fetches)
        computes = [sum(waiting[first:end]) + held_up_s for first, end in spans(steps(layers, count))]
        return pipelined_s(loads, computes, room(count))

    def is_ahead(self, fetches: Sequence[Fetch]) -> bool:
        """Return whether a thread reads ahead of fusing, which it does as soon as one tier is slow."""
        return any(self.machine.tiers[fetch.tier].is_ahead for fetch in fetches)

    def rows_s(self, blend: Blend, candidate_rows: int, forced: int) -> float:
        """Return the compute time that these candidate rows and forced rows add to a fused prefill."""
        without = replace(blend, candidate_rows=blend.candidate_rows - candidate_rows, forced=blend.forced - forced)
        return max(0.0, self.fused_s(blend) - self.fused_s(without))
