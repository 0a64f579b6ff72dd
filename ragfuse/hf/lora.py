"""A LoRA adapter that is trained: put beside a model's linear layers by PEFT, switched off, saved
and read.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ragfuse.errors import ModelError

ADAPTER_NAME = "default"
ALPHA_PER_RANK = 2
"""The adapter's output is scaled by `lora_alpha / r`, which is this."""


class LoraAdapter:
    """A LoRA adapter on all linear layers of a model's decoder, put there in place; at first it
    changes nothing.

    Args:
        model: The model, whose own weights stay as they are.
        rank: Rank of the adapter.
        seed: Seed of its first weights.
        base: The model's name, folder or id, which the saved adapter names.

    Raises:
        ModelError: The package peft is missing.
    """

    def __init__(self, model: PreTrainedModel, rank: int, seed: int, base: str) -> None:
        if find_spec("peft") is None:
            raise ModelError(
                "Training an adapter needs the package peft, which is not installed: pip install"
                " peft"
            )
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=rank,
            lora_alpha=ALPHA_PER_RANK * rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            for weight in model.parameters():
                weight.requires_grad_(False)
            self.module = get_peft_model(model, config)
        self.module.peft_config[ADAPTER_NAME].base_model_name_or_path = base
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in self.module.named_parameters() if weight.requires_grad
        }
        """The trained weights, float32, by name."""
        for weight in self.weights.values():
            weight.data = weight.data.float()

    def off(self) -> AbstractContextManager[None]:
        """Switch the adapter off in this context, so that the model computes as it did
        without it.
        """
        return self.module.disable_adapter()

    def read(self, folder: Path) -> None:
        """Take over the weights that `save` wrote into a folder."""
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self.module, load_peft_weights(str(folder), device="cpu"))

    def save(self, folder: Path) -> None:
        """Write the adapter into a folder, in PEFT's form."""
        self.module.save_pretrained(str(folder), save_embedding_layers=False)
