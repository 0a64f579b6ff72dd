"""What the tests of planning by time share: a machine of round figures, and prompts whose chunks
lie in tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ragfuse import Engine
from ragfuse.fuse.select import cost_of
from ragfuse.plan.controller import Controller
from ragfuse.plan.cost import CostModel, RowCost, TierCost
from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.kv import Entry
from ragfuse.types.plan import LoadPlan
from ragfuse.types.prompt import Prompt, Segment

LAYERS = 12
COST = RowCost(fixed_s=0.01, row_s=4e-4, key_s=1e-7)
MEMORY, DISK = TierCost(1e-6, 0.0, is_ahead=False), TierCost(1e-4, 1e-9)
NBYTES_PER_TOKEN = 24_000


def plan(
    prompt,
    entries,
    policy="auto",
    ratio=None,
    lost=frozenset(),
    *,
    choice=None,
    costs=None,
    deadline_s=None,
) -> LoadPlan:
    """The plan of a controller over the policies that there are."""
    return Controller(cost_of, costs, choice, policy, ratio, deadline_s).plan(prompt, entries, lost)


def machine(**byte_s: float) -> CostModel:
    """Full prefill of 1,000 tokens takes half a second; memory, disk (1 GB/s), and tiers of so many
    seconds a byte.
    """
    tiers = {name: TierCost(1e-4, seconds) for name, seconds in byte_s.items()}
    speeds = {"memory": MEMORY, "disk": DISK, **tiers}
    return CostModel(
        "model", "cpu", 1, "bfloat16", LAYERS, RowCost(0.01, 3.9e-4, 1e-7), COST, 1e-6, speeds
    )


def with_cost(costs: CostModel, **figures: float) -> CostModel:
    return replace(costs, fused=replace(costs.fused, **figures))


def timings(engine: Engine, **speeds: float) -> CostModel:
    """Round figures for the engine's own model: fusing is fast, and tiers take so many seconds a
    byte.
    """
    tiers = {
        name: TierCost(0.0, byte_s, is_ahead=name != "memory") for name, byte_s in speeds.items()
    }
    quick = with_cost(machine(), fixed_s=1e-4, row_s=1e-5, key_s=0.0)
    known = {
        "model": engine.model.fingerprint,
        "device": str(engine.model.device),
        "n_layers": engine.model.n_layers,
    }
    return replace(quick, threads=torch.get_num_threads(), tiers=tiers, **known)


def prompt_of(
    tiers: Sequence[str], n_tokens: int = 200, question: int = 20
) -> tuple[Prompt, dict[ChunkKey, Entry]]:
    """A chunk for each tier ("": in none) and a question; the first chunk stands as it was
    encoded.
    """
    segments, entries = [], {}
    for index, tier in enumerate(tiers):
        tokens = tuple(range(1000 * index, 1000 * index + n_tokens))
        key = ChunkKey("model", token_digest(tokens))
        segments.append(Segment(tokens, index * n_tokens, "chunk", (key,), f"book-{index}"))
        if tier:
            entries[key] = Entry(
                key, tier, n_tokens, LAYERS, {"raw": NBYTES_PER_TOKEN * n_tokens}, 0.0
            )
    return Prompt((*segments, Segment(tuple(range(question)), len(tiers) * n_tokens))), entries
