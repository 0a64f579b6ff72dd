"""Perplexity of what follows a text whose first half was dropped (AttentionStore 4.3.7, table 1).

Four ways: KV kept and placed anew, as here, with the first tokens of all and without them; token truncation, which
computes the rest again; and naive truncation, the paper's NKVT, whose keys keep the positions that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from typing import Any

import torch
from rich.console import Console

from ragfuse.errors import InputError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.model import HFModel, KVSource, Prefill
from ragfuse.settings import SINKS
from ragfuse.telemetry.progress import progress
from ragfuse.types.kv import ChunkKV, LayerKV

FOLLOWING = 256
"""Tokens that perplexity is taken on, behind each text."""


@dataclass(frozen=True)
class Perplexity:
    """Of the same tokens, four ways; how many tokens, and how many were kept and dropped.

    kept, recomputed, naive: behind the same kept tokens, `n_sinks` of which are the first ones of all. bare: by kept KV
    as well, of the last tokens alone.
    """

    kept: float
    recomputed: float
    naive: float
    bare: float
    n_sinks: int
    n_tokens: int
    n_kept: int
    n_dropped: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def perplexity_after(
    model: HFModel, text: str, window: int, texts: int, console: Console, ratio: float = 0.5, sinks: int = SINKS
) -> Perplexity:
    """Over `texts` parts of a text, each of `window` tokens and what follows; behind the sinks, `ratio` of it goes."""
    ids, size = model.tokens(text), window + FOLLOWING
    parts = [ids[lo : lo + size] for lo in range(0, len(ids) - size + 1, size)][:texts]
    if not parts:
        raise InputError(
            f"Wanted a text of {size:,} tokens to shorten, found {len(ids):,}. Give --data or less --window."
        )
    cut = int(ratio * window)
    sums, sinks = [0.0] * 4, min(sinks, window - cut)
    with progress(console) as bar:
        for part in bar.track(parts, description="perplexity after truncation"):
            for way, prefill in enumerate(shortened(model, part[: window + 1], cut, sinks)):
                sums[way] += _loss(model, prefill, part[window + 1 :])
    total = len(parts) * (FOLLOWING - 1)
    kept, recomputed, naive, bare = (exp(each / total) for each in sums)
    return Perplexity(kept, recomputed, naive, bare, sinks, total, window - cut, cut)


def shortened(model: HFModel, ids: Sequence[int], cut: int, sinks: int = 0) -> tuple[Prefill, ...]:
    """Four prefills of ids of which `cut` behind the first `sinks` are gone.

    KV kept at new positions, recomputed, KV kept as it was; and KV kept at new positions of ids without the first
    `cut`. The last id is computed in all of them.
    """
    whole, n = model.full_prefill(ids[:-1]).kv, len(ids) - 1
    left = [*ids[:sinks], *ids[sinks + cut :]]
    rows = [(lo, hi) for lo, hi in ((0, sinks), (sinks + cut, n)) if lo < hi]
    kept, naive, bare = (
        _continued(model, said, whole, spans, moves)
        for said, spans, moves in ((left, rows, True), (left, rows, False), (ids[cut:], [(cut, n)], True))
    )
    return kept, model.full_prefill(left), naive, bare


def _continued(
    model: HFModel, ids: Sequence[int], whole: ChunkKV, spans: Sequence[tuple[int, int]], moves: bool
) -> Prefill:
    """The prefill of ids whose first are those of spans of rows; `moves`: keys are rotated to their new positions."""
    runs, parts, at = list[CachedRun](), list[ChunkKV](), 0
    for index, (lo, hi) in enumerate(spans):
        runs.append(CachedRun(index, at, at + hi - lo, at - lo if moves else 0, False))
        layers = (LayerKV(layer.keys[:, lo:hi], layer.values[:, lo:hi]) for layer in whole.layers)
        parts.append(ChunkKV(tuple(layers)))
        at += hi - lo
    return model.fuse(ids, torch.arange(len(ids)), runs, KVSource(parts), "none", 0.0)


def _loss(model: HFModel, prefill: Prefill, following: Sequence[int]) -> float:
    """Nats of the ids that follow, in all."""
    logits = torch.log_softmax(model.score_continuation(prefill, following), -1)
    return -float(logits[torch.arange(len(following)), torch.tensor(list(following))].sum())
