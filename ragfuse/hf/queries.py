"""How large a model's queries are, channel by channel: an error in a key counts by the queries that meet it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragfuse.hf.model import HFModel

LOOKING: Final = "ragfuse-queries"
_seen: ContextVar[dict[int, Tensor] | None] = ContextVar("ragfuse_queries", default=None)


def query_sizes(model: HFModel, runs: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Float32 [H, D] for each layer: root mean square over `runs` and the query heads that share a key's.

    Empty where a family attends by itself, or in a way that PyTorch's attention does not: nothing is known then.
    """
    if model.profile.mode != "rows" or model.profile.refusal or not runs:
        return ()
    with model.lock, torch.no_grad(), _looking(model) as powers:
        try:
            for run in runs:
                model.model(input_ids=torch.tensor([list(run)], device=model.device), use_cache=False)
        except ValueError:  # scores are capped, for one
            return ()
    if sorted(powers) != list(range(model.n_layers)):
        return ()
    return tuple((powers[at] / sum(map(len, runs))).sqrt() for at in range(model.n_layers))


@contextmanager
def _looking(model: HFModel) -> Iterator[dict[int, Tensor]]:
    """While it lasts, the model's attention adds up its queries' squares by layer."""
    config, powers = model.model.config, dict[int, Tensor]()
    before, token = config._attn_implementation, _seen.set(powers)
    config._attn_implementation = LOOKING
    try:
        yield powers
    finally:
        config._attn_implementation = before
        _seen.reset(token)


def _attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    powers, at = _seen.get(), getattr(module, "layer_idx", None)
    if powers is not None and at is not None:
        groups = query.shape[1] // key.shape[1]
        power = query[0].float().square().sum(1).view(key.shape[1], groups, -1).mean(1).cpu()
        powers[at] = powers[at] + power if at in powers else power
    found: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, *args, **options)
    return found


ALL_ATTENTION_FUNCTIONS.register(LOOKING, _attention)
