"""How long things take on a measured machine: prefill, fused prefill, loading, and loading behind fusing.

Arithmetic over a MachineProfile. Nothing here chooses, and nothing reads a clock, a file or a tensor.
N layers, T tokens of a prompt, seconds throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from ragfuse.plan.steps import layers_a_read, room, spans, steps
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import Fetch
from ragfuse.types.policy_cost import CostOf, Needs, PolicyCost
from ragfuse.types.profiles import FusedCost, FusedPoint, MachineProfile


@dataclass(frozen=True)
class Blend:
    """One fused prefill in numbers: of T `tokens`, `forced` rows are computed, and `ratio` of `candidate_rows` cached
    ones.

    cost: of its policy. ratio: the share that the policy really takes, see `PolicyCost.share_of`.
    """

    cost: PolicyCost
    tokens: int
    forced: int
    candidate_rows: int
    ratio: float

    @classmethod
    def of(cls, point: FusedPoint, cost_of: CostOf) -> Blend:
        """Return what a point of a profile was measured with. cost_of: the costs of policies by name."""
        return cls(cost_of(point.policy), point.tokens, point.forced, point.candidate_rows, point.ratio)

    @property
    def needs(self) -> Needs:
        """What must be computed first; where there is nothing to choose, nothing."""
        return self.cost.needs if self.candidate_rows and self.ratio > 0 else "nothing"

    def rows(self, n_layers: int) -> list[float]:
        """Rows computed in each layer, on average over what is thinned out; by CacheBlend 4.3 where it is gradual."""
        share, first = self.ratio, 1 if self.needs == "all rows of a layer" else 0
        steps = n_layers - 1 - first
        shares = [share] * (n_layers - first)
        if self.cost.gradual and steps > 0:
            start = min(1.0, 1.5 * share)
            shares = [start + 2 * (share - start) * step / steps for step in range(steps + 1)]
        return [self.forced + each * self.candidate_rows for each in (*[1.0] * first, *shares)]


def features(blend: Blend, n_layers: int) -> tuple[float, ...]:
    """What each figure of a FusedCost is multiplied by, in the order of its fields."""
    rows, needs = sum(blend.rows(n_layers)) / n_layers, blend.needs
    rows += blend.forced if needs == "attention" else 0
    checked = blend.forced + blend.candidate_rows if needs == "all rows of a layer" else 0
    looked = blend.tokens if needs == "attention" else 0
    placed = blend.tokens - blend.forced
    return 1.0, rows, rows * blend.tokens, placed, float(checked > 0), checked, float(looked > 0), looked


def fused_s(cost: FusedCost, blend: Blend, n_layers: int) -> float:
    """A fused prefill whose cached KV is at hand."""
    return float(sum(each * times for each, times in zip(astuple(cost), features(blend, n_layers), strict=True)))


def layers_s(cost: FusedCost, blend: Blend, n_layers: int) -> tuple[list[float], list[float]]:
    """The same layer by layer: the pass that looks ([] where none does), and the pass that computes."""
    row_s = (cost.row_s + cost.score_s * blend.tokens) / n_layers
    placed_s = cost.placed_s * (blend.tokens - blend.forced) / n_layers
    passes = [row_s * rows + cost.fixed_s / n_layers for rows in blend.rows(n_layers)]
    if blend.needs == "attention":
        look_s = row_s * blend.forced + (cost.look_s + cost.look_token_s * blend.tokens) / n_layers
        return [look_s + placed_s] * n_layers, passes
    if blend.needs == "all rows of a layer":
        passes[min(1, n_layers - 1)] += cost.check_s + cost.check_row_s * (blend.forced + blend.candidate_rows)
    return [], [each + placed_s for each in passes]


def pipelined_s(loads: Sequence[float], computes: Sequence[float], waiting: int) -> float:
    """The end of `computes`, each of which needs the load of its step, while one thread loads ahead.

    At most `waiting` loaded steps wait to be taken; the thread holds one more in its hands (CacheBlend 5.1).
    """
    put, taken, done = 0.0, [0.0] * len(loads), 0.0
    for step, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        put = max(put + load, taken[step - waiting] if step >= waiting else 0.0)
        taken[step] = max(put, done)
        done = taken[step] + compute
    return done


@dataclass(frozen=True)
class Estimate:
    """What a measured machine will take."""

    machine: MachineProfile

    def knows(self, fetches: Sequence[Fetch]) -> bool:
        """Whether all tiers and levels of these were measured."""
        return all(fetch.tier in self.machine.tiers and self.knows_level(fetch.level) for fetch in fetches)

    def knows_level(self, level: str) -> bool:
        """Whether decoding a level was measured; raw needs none."""
        return level == LEVEL_NAMES[0] or level in self.machine.decode

    def prefill_s(self, tokens: int) -> float:
        """Full prefill of so many tokens."""
        fixed, linear, square = self.machine.prefill
        return fixed + linear * tokens + square * tokens * tokens

    def recompute_s(self, ratio: float, tokens: int) -> float:
        """T_recompute of CacheBlend 5.1: that share of a full prefill."""
        return ratio * self.prefill_s(tokens)

    def fused_s(self, blend: Blend) -> float:
        """A fused prefill whose cached KV is at hand."""
        return fused_s(self.machine.fused, blend, self.machine.n_layers)

    def load_s(self, tier: str, nbytes: int, n_reads: int | None = None) -> float:
        """One entry of a measured tier, by so many reads; None: as many as a prompt of such entries takes."""
        speed, layers = self.machine.tiers[tier], self.machine.n_layers
        reads = len(steps(layers, layers_a_read(nbytes, layers))) if n_reads is None else n_reads
        return speed.open_s + speed.read_s * reads + speed.byte_s * nbytes

    def decode_s(self, level: str, n_tokens: int) -> float:
        """Decoding so many tokens of a level."""
        return self.machine.decode.get(level, 0.0) * n_tokens

    def fetch_s(self, fetch: Fetch) -> float:
        """One segment, read and decoded."""
        return self.load_s(fetch.tier, fetch.nbytes) + self.decode_s(fetch.level, fetch.n_tokens)

    def kept_s(self, tier: str, level: str, raw_nbytes: int, n_tokens: int) -> float:
        """A chunk of so many bytes as raw, if it lay in a measured tier at a measured level."""
        nbytes = round(raw_nbytes * self.machine.packed.get(level, 1.0))
        return self.load_s(tier, nbytes) + self.decode_s(level, n_tokens)

    def count(self, fetches: Sequence[Fetch], chosen: int = 0) -> int:
        """The most layers of each chunk that are read together: `chosen`, or what `load.layers` takes unless told."""
        layers = self.machine.n_layers
        return min(chosen, layers) or layers_a_read(max((fetch.nbytes for fetch in fetches), default=0), layers)

    def steps_s(self, fetches: Sequence[Fetch], chosen: int = 0) -> list[float]:
        """Loading, step by step: some layers of every chunk each, read and decoded by the thread that reads."""
        layers, tiers, count = self.machine.n_layers, self.machine.tiers, self.count(fetches, chosen)
        per_read = sum(tiers[fetch.tier].read_s for fetch in fetches)
        per_layer = sum(tiers[fetch.tier].byte_s * fetch.nbytes for fetch in fetches) / layers
        per_layer += sum(self.decode_s(fetch.level, fetch.n_tokens) for fetch in fetches) / layers
        loads = [per_read + per_layer * size for size in steps(layers, count)]
        loads[0] += sum(tiers[fetch.tier].open_s for fetch in fetches)
        return loads

    def ttft_s(self, blend: Blend, fetches: Sequence[Fetch], chosen: int = 0) -> float:
        """Until the first logits, reading while fusing where `load.layers` does so.

        Each read by a thread holds up the model a little. A policy that looks takes all layers as it looks, and finds
        them at hand as it computes.
        """
        count, layers = self.count(fetches, chosen), self.machine.n_layers
        loads = self.steps_s(fetches, chosen)
        look, passes = layers_s(self.machine.fused, blend, layers)
        if not self.is_ahead(fetches):
            return sum(loads) + sum(look) + sum(passes)
        waiting, then = (look, sum(passes)) if look else (passes, 0.0)
        held_up_s = self.machine.held_up_s * len(fetches)
        computes = [sum(waiting[first:end]) + held_up_s for first, end in spans(steps(layers, count))]
        return pipelined_s(loads, computes, room(count)) + then

    def is_ahead(self, fetches: Sequence[Fetch]) -> bool:
        """Whether a thread reads these while others are fused: one of them is slow to read."""
        return any(self.machine.tiers[fetch.tier].is_ahead for fetch in fetches)

    def rows_s(self, blend: Blend, candidate_rows: int, forced: int) -> float:
        """What a part of a blend's rows adds to its computing: these of the offered, and these of the forced."""
        without = replace(blend, candidate_rows=blend.candidate_rows - candidate_rows, forced=blend.forced - forced)
        return max(0.0, self.fused_s(blend) - self.fused_s(without))
