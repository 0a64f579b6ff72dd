"""What errors in the keys, and in the values, of each layer cost the words that follow.

A layer may bear an error that ruins another one's: CacheGen's insight (its 5.1.2), measured instead of assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.types.kv import ChunkKV, LayerKV

SPANS = 10
"""Neighbouring layers are measured together, in so many spans."""


def rounding_costs(
    model: HFModel, token_ids: Sequence[int], follow: Sequence[int], rounded: Callable[[ChunkKV], ChunkKV]
) -> tuple[tuple[float, float], ...]:
    """For each layer what its keys and its values cost, in nats a token: KL of the words along `follow`, behind
    `token_ids`, to what the model says over exact KV, when only they are as `rounded` gives them.

    A span of layers is changed at once, and every one of them gets an equal part. Empty for a model whose KV is not
    reused, and where a cost is no number.
    """
    if model.profile.refusal or len(follow) < 2:
        return ()
    exact = model.encode(token_ids)
    changed, n = rounded(exact), model.n_layers
    wanted = _along(model, token_ids, follow, exact)
    costs = list[tuple[float, float]]()
    for lo, hi in _spans(n):
        both = [
            max(kl(wanted, _along(model, token_ids, follow, _between(exact, changed, lo, hi, part))), 0.0) / (hi - lo)
            for part in ("keys", "values")
        ]
        costs += [(both[0], both[1])] * (hi - lo)
    return tuple(costs) if torch.tensor(costs).isfinite().all() else ()


def kl(wanted: Tensor, found: Tensor) -> float:
    """Mean over n positions of KL(wanted || found) in nats, from logits float32 [n, V]."""
    log_wanted, log_found = torch.log_softmax(wanted, -1), torch.log_softmax(found, -1)
    return float((log_wanted.exp() * (log_wanted - log_found)).sum(-1).mean())


def _spans(n_layers: int) -> Iterator[tuple[int, int]]:
    count = min(SPANS, n_layers)
    for at in range(count):
        yield n_layers * at // count, n_layers * (at + 1) // count


def _between(exact: ChunkKV, changed: ChunkKV, lo: int, hi: int, part: str) -> ChunkKV:
    """Exact KV but for the keys, or values, of layers lo..hi-1."""
    layers = list(exact.layers)
    for at in range(lo, hi):
        keys, values = (changed if name == part else exact for name in ("keys", "values"))
        layers[at] = LayerKV(keys.layers[at].keys, values.layers[at].values)
    return ChunkKV(tuple(layers))


def _along(model: HFModel, token_ids: Sequence[int], follow: Sequence[int], kv: ChunkKV) -> Tensor:
    """Logits float32 [len(follow) - 1, V] behind a run's KV and each id but the last that follows."""
    n = len(token_ids)
    positions = torch.arange(n + 1, device=model.device)
    read = [CachedRun(0, 0, n, 0, blend=False)]
    prefill = model.fuse([*token_ids, follow[0]], positions, read, KVSource([kv]), "none", 0.0)
    return model.score_continuation(prefill, follow[1:])
