"""Ways to break a fused prefill on purpose: each must be caught by a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragfuse.fuse.attend import RowMask
from ragfuse.fuse.fusor import CachedRun
from ragfuse.fuse.rope import shifted
from ragfuse.hf.hooks import ATTENTION
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.types.kv import ChunkKV, Layer, LayerKV
from tests.kits import hf as kit

Break = Callable[[HFModel], Any]


def attend_wrongly(hides: Callable[[Tensor, Tensor, Tensor, int | None], Tensor]) -> Break:
    """Attention under a wrong mask: `hides`(rows, at [R, 1], keys [1, T], window) says which keys
    are not seen.
    """

    def attention(
        module: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: RowMask,
        scaling: float,
        sliding_window: int | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        at, keys = (
            attention_mask.positions[attention_mask.rows][:, None],
            attention_mask.positions[None],
        )
        hidden = hides(attention_mask.rows, at, keys, sliding_window)
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        weights = torch.softmax(
            scores.masked_fill(hidden.to(scores.device), torch.finfo(scores.dtype).min).float(), -1
        )
        return (weights.to(query.dtype) @ value.repeat_interleave(groups, 1)).transpose(1, 2), None

    @contextmanager
    def broken(model: HFModel) -> Iterator[HFModel]:
        right = ALL_ATTENTION_FUNCTIONS[ATTENTION]
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
        try:
            yield model
        finally:
            ALL_ATTENTION_FUNCTIONS.register(ATTENTION, right)

    return broken


def _right(rows: Tensor, at: Tensor, keys: Tensor, window: int | None) -> Tensor:
    return (keys > at) | ((keys <= at - window) if window else torch.zeros_like(keys > at))


def _bottom_right(rows: Tensor, at: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """A triangle that ends at the last key, as if the rows were the prompt's last ones."""
    count, total = len(rows), keys.shape[1]
    return torch.arange(total)[None] > torch.arange(total - count, total)[:, None]


def overriding(change: Callable[[HFModel], Mapping[str, Any]]) -> Break:
    """A copy of the model some of whose attributes are others, made for it."""

    @contextmanager
    def broken(model: HFModel) -> Iterator[HFModel]:
        twin = kit.twin(model)
        vars(twin).update(change(model))
        yield twin

    return broken


def with_profile(change: Callable[[HFModel], dict[str, Any]]) -> Break:
    """A profile that is wrong."""
    return overriding(lambda model: {"profile": replace(model.profile, **change(model))})


def with_kv(change: Callable[[HFModel, LayerKV], LayerKV]) -> Break:
    """Stored KV that is wrong."""

    def encode(model: HFModel, ids: list[int]) -> ChunkKV:
        return ChunkKV(tuple(change(model, layer) for layer in model.encode(ids).layers))

    return overriding(lambda model: {"encode": partial(encode, model)})


def with_fused(change: Callable[[HFModel, list[CachedRun], KVSource], tuple[Any, Any]]) -> Break:
    """Runs that are placed wrongly, or a source that hands out something else."""

    def fuse(model: HFModel, ids: Any, at: Any, runs: Any, source: KVSource, *rest: Any) -> Any:
        return model.fuse(ids, at, *change(model, list(runs), source), *rest)

    return overriding(lambda model: {"fuse": partial(fuse, model)})


class MutatingSource:
    """Hands out stored tensors that it turns in place."""

    def __init__(self, model: HFModel, source: KVSource) -> None:
        self.model, self.source = model, source

    def __iter__(self) -> Iterator[Sequence[Layer]]:
        for layers in self.source:
            for layout, layer in zip(self.model.profile.rope, layers, strict=True):
                for kv in filter(None, layer.values()):
                    kv.keys.copy_(shifted(kv.keys, 1, layout))
            yield layers


def _one_further(model: HFModel, layer: LayerKV) -> LayerKV:
    layout = next(layout for layout in model.profile.rope if layout is not None)
    return LayerKV(shifted(layer.keys, 1, layout), layer.values)


def _other_pairing(model: HFModel) -> dict[str, Any]:
    swap = {"half": "interleaved", "interleaved": "half"}
    turned = (each and replace(each, pairing=swap[each.pairing]) for each in model.profile.rope)
    return {"rope": tuple(turned)}


# What is broken -> how; all are run on a rotary model that attends through our function.
BREAKS: Mapping[str, Break] = MappingProxyType(
    {
        "a row sees the key after it": attend_wrongly(
            lambda rows, at, keys, window: _right(rows, at + 1, keys, window)
        ),
        "a row does not see itself": attend_wrongly(
            lambda rows, at, keys, window: (
                _right(rows, at, keys, window) | ((keys == at) & (at > 0))
            )
        ),
        "the mask is a triangle of the last rows": attend_wrongly(_bottom_right),
        "stored keys stand one position too far": with_kv(_one_further),
        "keys and values are shifted by one row": with_kv(
            lambda _, layer: LayerKV(layer.keys.roll(1, 1), layer.values.roll(1, 1))
        ),
        "the rotation pairs other dims": with_profile(_other_pairing),
        "chunks are placed one position too early": with_fused(
            lambda _, runs, source: (
                [replace(run, shift=max(run.shift - 1, 0)) for run in runs],
                source,
            )
        ),
        "the last run is dropped from the runs": with_fused(
            lambda _, runs, source: (runs[:-1], source)
        ),
        "stored tensors are turned in place": with_fused(
            lambda model, runs, source: (runs, MutatingSource(model, source))
        ),
    }
)
WINDOW_BREAKS: Mapping[str, Break] = MappingProxyType(
    {
        "the window is ignored": attend_wrongly(
            lambda rows, at, keys, window: _right(rows, at, keys, None)
        ),
        "the window is one too long": attend_wrongly(
            lambda rows, at, keys, window: _right(rows, at, keys, window + 1 if window else None)
        ),
        "the window is one too short": attend_wrongly(
            lambda rows, at, keys, window: _right(rows, at, keys, window - 1 if window else None)
        ),
    }
)
