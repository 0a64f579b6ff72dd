"""KV deviation and attention deviation: how far reused KV, and attention over it, is from full
prefill's.

A token's KV deviation on a layer is the L2 norm of the difference of its key and value, over all
heads. A layer's attention deviation is the L2 norm of the difference of the forward attention
matrix, with the rows of the question over all keys (CacheBlend section 4.1, figures 6 to 8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ragfuse.hf.model import HFModel, Prefill
from ragfuse.types.kv import ChunkKV


def kv_deviation(found: ChunkKV, wanted: ChunkKV) -> Tensor:
    """Return the L2 distance of two prompts' KV over the same T tokens: float32 [layers, T]."""
    rows = []
    for a, b in zip(found.layers, wanted.layers, strict=True):
        keys, values = (a.keys - b.keys).float(), (a.values - b.values).float()
        rows.append((keys.square().sum((0, 2)) + values.square().sum((0, 2))).sqrt())
    return torch.stack(rows)


def attention_of(model: HFModel, prefill: Prefill, n_rows: int) -> list[Tensor]:
    """Return the attention weights of a prefilled prompt's last n rows, for each layer: float32
    [heads, n, T].

    These rows are recomputed over the cached rest. The prefill cannot be used afterwards.
    """
    ids = torch.tensor([list(prefill.token_ids[-n_rows:])], device=model.device)
    if prefill.cache is None:
        return []
    prefill.cache.length -= n_rows
    with _eager(model), model.lock, torch.no_grad():
        out = model.model(
            input_ids=ids, past_key_values=prefill.cache, use_cache=True, output_attentions=True
        )
    return [layer[0].float() for layer in out.attentions]


def attention_deviation(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of the difference of two attention matrices [heads, n, T], by layer:
    float32 [layers].
    """
    return torch.stack(
        [torch.linalg.vector_norm(a - b) for a, b in zip(found, wanted, strict=True)]
    )


@contextmanager
def _eager(model: HFModel) -> Iterator[None]:
    """Use the model's eager attention, the only implementation that returns attention weights."""
    before = model.model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.model.set_attn_implementation(before)
