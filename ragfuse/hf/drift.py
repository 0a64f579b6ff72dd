"""Reads a model's drift (`fuse/drift.py`), a file in its folder."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ragfuse.errors import ModelError
from ragfuse.types.kv import ChunkKV, LayerKV


def read_drift(file: Path, model: PreTrainedModel) -> ChunkKV | None:
    """Return the drift in a file of a model's folder, on the model's device; None if there is none.

    Raises:
        ModelError: It is damaged.
    """
    if not file.is_file():
        return None
    try:
        parts = load_file(file, device=str(model.device))
        n_layers = model.config.get_text_config().num_hidden_layers
        layers = tuple(LayerKV(parts[f"keys.{i}"], parts[f"values.{i}"]) for i in range(n_layers))
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(
            f"'{file}' cannot be read ({error}). Remove the file, or measure the drift again."
        ) from error
    return ChunkKV(layers)
