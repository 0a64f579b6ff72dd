"""Perplexity of what follows a text whose first half was dropped (AttentionStore 4.3.7, table 1).

Three ways: KV kept and placed anew, as here; token truncation, which computes the rest again; and naive truncation, the
paper's NKVT, whose keys keep the positions that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from typing import Any

import torch
from rich.console import Console

from ragfuse.bench.runner import progress
from ragfuse.core import ChunkKV, LayerKV
from ragfuse.errors import InputError
from ragfuse.fuse.fusor import Run
from ragfuse.fuse.gather import gathered
from ragfuse.hf.model import HFModel, KVSource, Prefill

FOLLOWING = 256
"""Tokens that perplexity is taken on, behind each text."""


@dataclass(frozen=True)
class Perplexity:
    """Of the same tokens behind the same kept ones, three ways; how many tokens, and how many were kept and dropped."""

    kept: float
    recomputed: float
    naive: float
    n_tokens: int
    n_kept: int
    n_dropped: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def perplexity_after(
    model: HFModel, text: str, window: int, texts: int, console: Console, ratio: float = 0.5
) -> Perplexity:
    """Over `texts` parts of a text, each of `window` tokens and what follows; the first `ratio` of it is dropped."""
    ids, size = model.tokens(text), window + FOLLOWING
    parts = [ids[lo : lo + size] for lo in range(0, len(ids) - size + 1, size)][:texts]
    if not parts:
        raise InputError(
            f"Wanted a text of {size:,} tokens to shorten, found {len(ids):,}. Give --data or less --window."
        )
    sums, cut = [0.0, 0.0, 0.0], int(ratio * window)
    with progress(console) as bar:
        for part in bar.track(parts, description="perplexity after truncation"):
            for way, prefill in enumerate(shortened(model, part[: window + 1], cut)):
                sums[way] += _loss(model, prefill, part[window + 1 :])
    total = len(parts) * (FOLLOWING - 1)
    kept, recomputed, naive = (exp(each / total) for each in sums)
    return Perplexity(kept, recomputed, naive, total, window - cut, cut)


def shortened(model: HFModel, ids: Sequence[int], cut: int) -> tuple[Prefill, Prefill, Prefill]:
    """Prefills of ids without the first `cut`: KV kept at new positions, computed again, KV kept as it was.

    The last id is computed in all of them.
    """
    whole, left = model.full_prefill(ids[:-1]).kv, ids[cut:]
    n_kept = len(left) - 1
    placed = gathered(whole, [(cut, cut + n_kept)], model.profile.rope)
    as_it_was = ChunkKV(tuple(LayerKV(kv.keys[:, cut:].contiguous(), kv.values[:, cut:]) for kv in whole.layers))
    kept, naive = (
        model.fuse(left, torch.arange(len(left)), [Run(0, 0, n_kept, 0, False)], KVSource([kv]), "none", 0.0)
        for kv in (placed, as_it_was)
    )
    return kept, model.full_prefill(left), naive


def _loss(model: HFModel, prefill: Prefill, following: Sequence[int]) -> float:
    """Nats of the ids that follow, in all."""
    logits = torch.log_softmax(model.along(prefill, following), -1)
    return -float(logits[torch.arange(len(following)), torch.tensor(list(following))].sum())
