"""Measure the impact of rounded KV, for codec tables (CacheGen 5.1.2).

The measures are the size of queries in each channel, and the effect of each layer's rounding on
predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragfuse.hf.hooks import attending_by
from ragfuse.hf.model import HFModel
from ragfuse.hf.prefill import PromptPart
from ragfuse.types.kv import ChunkKV, LayerKV

Attention = Callable[..., tuple[Tensor, None]]


def query_sizes(model: HFModel, runs: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the root mean square of a model's queries, float32 [H, D] per layer.

    The mean is over all tokens in `runs`, and over the query heads that share a key head. The
    result is empty if KV reuse is refused, or if the model's attention cannot be replaced by
    PyTorch's attention function.
    """
    if model.profile.mode != "rows" or model.profile.refusal or not runs:
        return ()
    powers: dict[int, Tensor] = {}
    name = f"ragfuse-queries-{id(powers)}"  # unique, because other models may run concurrently
    ALL_ATTENTION_FUNCTIONS[name] = _recording(powers, ALL_ATTENTION_FUNCTIONS["sdpa"])
    try:
        with model.lock, torch.no_grad(), attending_by(model.model, name):
            for run in runs:
                model.model(
                    input_ids=torch.tensor([list(run)], device=model.device), use_cache=False
                )
    except ValueError:  # unsupported by sdpa, e.g. capped scores
        return ()
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
    if sorted(powers) != list(range(model.n_layers)):
        return ()
    return tuple((powers[at] / sum(map(len, runs))).sqrt() for at in range(model.n_layers))


def _recording(powers: dict[int, Tensor], attention: Attention) -> Attention:
    """Wrap an attention function to sum the squares of its queries by layer."""

    @wraps(attention)
    def recorded(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, None]:
        at, heads = getattr(module, "layer_idx", None), key.shape[1]
        if at is not None:
            power = query[0].float().square().sum(1).view(heads, -1, query.shape[-1]).mean(1).cpu()
            powers[at] = powers[at] + power if at in powers else power
        return attention(module, query, key, value, *args, **options)

    return recorded


SPANS = 10
"""Number of groups of adjacent layers. All layers of a group are rounded at once."""


def rounding_costs(
    model: HFModel,
    token_ids: Sequence[int],
    follow: Sequence[int],
    rounded: Callable[[ChunkKV], ChunkKV],
) -> tuple[tuple[float, float], ...]:
    """Return the cost of rounding the keys or the values of each layer, in nats per token.

    The cost is the KL divergence between predictions of the tokens `follow` with exact KV and with
    rounded KV. A group of layers is rounded at once, and each layer of the group gets an equal
    share of the cost.

    Args:
        model: The model.
        token_ids: Tokens whose KV is rounded.
        follow: The tokens after `token_ids`, at least two.
        rounded: Rounds KV like a codec level.

    Returns:
        (cost of keys, cost of values) per layer. Empty if KV reuse is refused or a cost is not
        finite.
    """
    if model.profile.refusal or len(follow) < 2:
        return ()
    exact = model.encode(token_ids)
    changed, n = rounded(exact), model.n_layers
    wanted = _along(model, token_ids, follow, exact)
    costs = list[tuple[float, float]]()
    for span in np.array_split(range(n), min(SPANS, n)):
        lo, hi = int(span[0]), int(span[-1]) + 1
        both = [
            max(
                kl(
                    wanted, _along(model, token_ids, follow, _between(exact, changed, lo, hi, part))
                ),
                0.0,
            )
            / (hi - lo)
            for part in ("keys", "values")
        ]
        costs += [(both[0], both[1])] * (hi - lo)
    return tuple(costs) if torch.tensor(costs).isfinite().all() else ()


def kl(wanted: Tensor, found: Tensor) -> float:
    """Return the mean KL(wanted || found) over n positions, in nats, from logits float32 [n, V]."""
    found, wanted = found.log_softmax(-1), wanted.log_softmax(-1)
    return float(kl_div(found, wanted, reduction="batchmean", log_target=True))


def _between(exact: ChunkKV, changed: ChunkKV, lo: int, hi: int, part: str) -> ChunkKV:
    """Return `exact`, but take keys or values (`part`) of layers lo..hi-1 from `changed`."""
    layers = list(exact.layers)
    for at in range(lo, hi):
        keys, values = (changed if name == part else exact for name in ("keys", "values"))
        layers[at] = LayerKV(keys.layers[at].keys, values.layers[at].values)
    return ChunkKV(tuple(layers))


def _along(model: HFModel, token_ids: Sequence[int], follow: Sequence[int], kv: ChunkKV) -> Tensor:
    """Return the logits float32 [len(follow) - 1, V] that predict `follow[1:]` after given KV."""
    parts = PromptPart(tuple(token_ids), kv, blend=False), PromptPart((follow[0],))
    return model.score_continuation(model.fuse_parts(parts, "none", 0.0), follow[1:])
