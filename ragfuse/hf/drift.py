"""Reads a model's drift (`fuse/drift.py`), a file in its folder that holds for the measured weights
only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ragfuse.errors import ModelError
from ragfuse.types.kv import ChunkKV, LayerKV

DRIFT_FILE = "ragfuse_drift.kv"
"""A file of safetensors by another ending, as vLLM takes each *.safetensors of a model's folder for
weights.
"""
SAMPLE = 16
"""Number of values of every weight that are stored in the file, to recognise the weights."""
ROUNDING = 2.0**-7
"""Relative difference of a weight between two dtypes that still counts as the same."""


def read_drift(folder: Path, model: PreTrainedModel) -> ChunkKV | None:
    """Return the drift in a model's folder, on the model's device; None if there is none.

    Call it before the model's weights are packed.

    Raises:
        ModelError: It is damaged, or was measured on other weights.
    """
    path = folder / DRIFT_FILE
    if not path.is_file():
        return None
    again = "Remove the file, or measure the drift again."
    try:
        parts = load_file(path, device=str(model.device))
        stored, n_layers = parts.pop("weights"), model.config.get_text_config().num_hidden_layers
        layers = tuple(LayerKV(parts[f"keys.{i}"], parts[f"values.{i}"]) for i in range(n_layers))
    except (OSError, SafetensorError, KeyError, AttributeError) as error:
        raise ModelError(f"'{path}' cannot be read ({error}). {again}") from error
    sample = weight_sample(model)
    if sample.shape != stored.shape or not torch.allclose(
        sample, stored.to(sample), rtol=ROUNDING, atol=1e-6
    ):
        raise ModelError(f"'{path}' was measured on other weights. {again}")
    return ChunkKV(layers)


def weight_sample(model: PreTrainedModel) -> Tensor:
    """Return a few values of every weight, in the order of their names: float32 [n]."""
    weights = sorted(model.state_dict().items())
    flat = [weight.detach().reshape(-1) for _, weight in weights if weight.is_floating_point()]
    return torch.cat(
        [each[:: max(1, each.numel() // SAMPLE)][:SAMPLE].float().cpu() for each in flat]
    )
