"""Models of a given shape with random weights: for measuring speed, where no pretrained weights are needed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ragfuse.errors import ModelError
from ragfuse.hf.model import HFModel


def random_model(shape: Mapping[str, object], dtype: str, device: str = "cpu", seed: int = 0) -> HFModel:
    """A model with the config `shape` (transformers' names, "model_type" first), weights drawn from `seed`.

    Built where and as it will run: an 8B model in bfloat16 takes 16 GB of the device and next to nothing elsewhere.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"Wanted device '{device}', but torch sees no CUDA device here. Use --device cpu.")
    config = AutoConfig.for_model(**dict(shape))
    devices = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return HFModel(model, None).packed()
