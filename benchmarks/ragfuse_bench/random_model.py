"""Models of a given shape with random weights: for measuring speed, where no pretrained weights are
needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ragfuse.hf.model import HFModel


def random_model(
    shape: Mapping[str, object], dtype: str, device: str = "cpu", seed: int = 0
) -> HFModel:
    """Return a model of a given shape with random weights.

    It is built directly on the device in its dtype: an 8B model in bfloat16 takes 16 GB there and
    almost nothing of the host's memory.

    Args:
        shape: The config, in transformers' names, "model_type" included.
        dtype: Name of the dtype, such as "bfloat16".
        device: Where it runs.
        seed: Of the weights.
    """
    config = AutoConfig.for_model(**dict(shape))
    devices = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    return HFModel(model, None).packed()
