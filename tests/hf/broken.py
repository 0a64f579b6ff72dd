"""Ways to break a fused prefill on purpose: each must be caught by a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
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
from ragfuse.types.kv import ChunkKV, LayerKV

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


class Twin(HFModel):
    """The same model object under the same profile, to be broken by overriding."""

    def __init__(self, model: HFModel) -> None:
        self.__dict__.update(model.__dict__)


def overriding(**changed: Callable[[HFModel], Any]) -> Break:
    """A twin some of whose attributes are others, made for the model."""

    @contextmanager
    def broken(model: HFModel) -> Iterator[HFModel]:
        twin = Twin(model)
        twin.__dict__.update({name: make(model) for name, make in changed.items()})
        yield twin

    return broken


def with_profile(change: Callable[[HFModel], dict[str, Any]]) -> Break:
    """A profile that is wrong."""
    return overriding(profile=lambda model: replace(model.profile, **change(model)))


def with_kv(change: Callable[[HFModel, LayerKV], LayerKV]) -> Break:
    """Stored KV that is wrong."""
    return overriding(
        encode=lambda model: (
            lambda ids: ChunkKV(tuple(change(model, layer) for layer in model.encode(ids).layers))
        )
    )


def with_runs(change: Callable[[list[CachedRun]], list[CachedRun]]) -> Break:
    """Runs that are placed wrongly."""
    return overriding(
        fuse=lambda model: (
            lambda ids, positions, runs, *rest: model.fuse(
                ids, positions, change(list(runs)), *rest
            )
        )
    )


class MutatingSource:
    """Hands out stored tensors that it turns in place."""

    def __init__(self, model: HFModel, source: KVSource) -> None:
        self.model, self.source = model, source

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        found = self.source.read(layer)
        for kv in found.values():
            if kv is not None:
                kv.keys.copy_(shifted(kv.keys, 1, self.model.profile.rope[layer]))
        return found

    def ready(self) -> int:
        return 0


mutating = overriding(
    fuse=lambda model: (
        lambda ids, positions, runs, source, *rest: model.fuse(
            ids, positions, runs, MutatingSource(model, source), *rest
        )
    )
)


def _one_further(model: HFModel, layer: LayerKV) -> LayerKV:
    layout = next(layout for layout in model.profile.rope if layout is not None)
    return LayerKV(shifted(layer.keys, 1, layout), layer.values)


def _other_pairing(model: HFModel) -> dict[str, Any]:
    swap = {"half": "interleaved", "interleaved": "half"}
    return {
        "rope": tuple(
            layout and dataclasses.replace(layout, pairing=swap[layout.pairing])
            for layout in model.profile.rope
        )
    }


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
        "everything is seen": attend_wrongly(lambda rows, at, keys, window: keys < 0),
        "stored keys stand one position too far": with_kv(_one_further),
        "stored values are scaled by a tenth": with_kv(
            lambda _, layer: LayerKV(layer.keys, layer.values * 1.1)
        ),
        "keys and values are shifted by one row": with_kv(
            lambda _, layer: LayerKV(layer.keys.roll(1, 1), layer.values.roll(1, 1))
        ),
        "the rotation pairs other dims": with_profile(_other_pairing),
        "keys are not rotated": with_profile(lambda model: {"rope": (None,) * model.n_layers}),
        "chunks are placed one position too early": with_runs(
            lambda runs: [replace(run, shift=max(run.shift - 1, 0)) for run in runs]
        ),
        "the last run is dropped from the runs": with_runs(lambda runs: runs[:-1]),
        "stored tensors are turned in place": mutating,
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
