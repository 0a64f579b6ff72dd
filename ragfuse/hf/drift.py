"""A model's drift as a file in its folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ragfuse.core import ChunkKV, LayerKV
from ragfuse.errors import ModelError
from ragfuse.hf import probe

DRIFT = "drift.safetensors"


def read_drift(folder: Path, model: PreTrainedModel) -> ChunkKV | None:
    """The drift in a model's folder, on its device, None where there is none.

    ModelError if it is damaged or of another model's shape.
    """
    if not (folder / DRIFT).is_file():
        return None
    try:
        parts = load_file(folder / DRIFT, device=str(model.device))
        n_layers = model.config.get_text_config().num_hidden_layers
        layers = tuple(LayerKV(parts[f"keys.{i}"], parts[f"values.{i}"]) for i in range(n_layers))
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(f"'{folder / DRIFT}' cannot be read ({error}). Remove it, or measure it again.") from error
    one = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    wanted = probe.plain_kv(model, one, one[0])
    shapes = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers]
    if len(parts) != 2 * len(layers) or shapes != [(tuple(k.keys.shape), tuple(k.values.shape)) for k in wanted]:
        raise ModelError(
            f"'{folder / DRIFT}' was measured on a model of another shape. Remove it, or measure it again."
        )
    if not all(bool(part.isfinite().all()) for part in parts.values()):
        raise ModelError(f"'{folder / DRIFT}' holds numbers that are none. Remove it, or measure it again.")
    return ChunkKV(layers)


def write_drift(folder: Path, drift: ChunkKV) -> None:
    """Put a drift into a model's folder, where `load_model` finds it."""
    named = {"keys": [layer.keys for layer in drift.layers], "values": [layer.values for layer in drift.layers]}
    save_file(
        {f"{name}.{i}": part.contiguous() for name, parts in named.items() for i, part in enumerate(parts)},
        folder / DRIFT,
    )
