"""Measures the size of a model's queries per channel, since an error in a key matters in proportion
to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragfuse.hf.hooks import attending_by
from ragfuse.hf.model import HFModel

Attention = Callable[..., tuple[Tensor, None]]


def query_sizes(model: HFModel, runs: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the root mean square of a model's queries, float32 [H, D] for each layer.

    The mean is over the tokens of `runs` and over the query heads that share a key head. The result
    is empty if the model computes attention by itself, or in a way that PyTorch's attention
    function does not support.
    """
    if model.profile.mode != "rows" or model.profile.refusal or not runs:
        return ()
    powers: dict[int, Tensor] = {}
    name = f"ragfuse-queries-{id(powers)}"  # of its own, as other models may run meanwhile
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
    """Wrap an attention function so that it also sums the squares of its queries by layer."""

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
