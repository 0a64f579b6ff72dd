"""Chunk adapters: LoRA adapters that are active only while chunks are encoded after filler text.

A chunk adapter changes the stored KV of chunks, so that reused KV gives results closer to full
prefill. Questions, recomputed tokens and full prefill use the plain model. `ChunkAdapter` is a
trained adapter, and `LoraAdapter` is an adapter in training. Adapters are stored in PEFT's format.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragfuse.errors import ModelError
from ragfuse.types.keys import digest

COPY_ANEW = "Copy the file again from its source."


def read_json_object(file: Path, advice: str = COPY_ANEW) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        file: The file.
        advice: The last sentence of the error message, which tells the user what to do.

    Raises:
        ModelError: The file cannot be read, or is not a JSON object.
    """
    try:
        return TypeAdapter(dict[str, Any]).validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"'{file}' cannot be read ({error}). {advice}") from error


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""The prefix that PEFT puts before module names."""
TRAIN_ANEW = "Train the adapter again with `ragfuse adapt`."


class ChunkAdapter:
    """A LoRA adapter for chunks: two low-rank matrices for each adapted linear layer.

    Args:
        pairs: The matrices A [r, in] and B [out, r] by module name, in the model's compute dtype. B
            is already multiplied by the adapter's scale.
    """

    def __init__(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.pairs = dict(pairs)

    @cached_property
    def digest(self) -> str:
        """The digest of the adapter's weights, which is part of the model's fingerprint."""
        named = {
            f"{name}.{part}": matrix.detach().cpu().contiguous()
            for name, pair in self.pairs.items()
            for part, matrix in zip("AB", pair, strict=True)
        }
        return digest(save(named))

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Activate the adapter within the `with` block. The caller must hold the model's lock."""
        modules = dict(model.named_modules())
        hooks = [
            modules[name].register_forward_hook(partial(_added, down=down, up=up))
            for name, (down, up) in self.pairs.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _added(
    layer: nn.Module, args: tuple[Tensor, ...], out: Tensor, *, down: Tensor, up: Tensor
) -> Tensor:
    x = args[0]
    inner = x.flatten(0, -2) @ down.to(x.device).T
    return torch.addmm(out.flatten(0, -2), inner, up.to(x.device).T).view_as(out)


def read_chunk_adapter(folder: Path, model: PreTrainedModel) -> ChunkAdapter:
    """Read a model's chunk adapter from a folder.

    Args:
        folder: The folder with PEFT's two files.
        model: The model for which the adapter was trained.

    Raises:
        ModelError: A file is missing or damaged, or the adapter does not fit the model.
    """
    config = read_json_object(folder / ADAPTER_CONFIG, TRAIN_ANEW)
    modules, pairs = dict(model.named_modules()), dict[str, tuple[Tensor, Tensor]]()
    try:
        weights = load_file(folder / ADAPTER_WEIGHTS)
        scale = config["lora_alpha"] / config["r"]
        for name in sorted({name.rpartition(".lora_")[0] for name in weights}):
            down, up = (weights[f"{name}.lora_{part}.weight"] for part in "AB")
            layer: Any = modules[name.removeprefix(PEFT_PREFIX)]
            if (up.shape[0], down.shape[1]) != (layer.out_features, layer.in_features):
                raise KeyError(f"{name} has the wrong shape")
            pairs[name.removeprefix(PEFT_PREFIX)] = (
                down.to(model.dtype),
                (up.float() * scale).to(model.dtype),
            )
    except (OSError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"The chunk adapter in '{folder}' cannot be read or does not fit the model ({error!r})."
            f" {TRAIN_ANEW}"
        ) from error
    return ChunkAdapter(pairs)


ADAPTER_NAME = "default"
ALPHA_PER_RANK = 2
"""`lora_alpha / r`, the scale of the adapter's output."""


class LoraAdapter:
    """A trainable LoRA adapter on all linear layers of a model's decoder, added in place.

    Before training, the adapter has no effect.

    Args:
        model: The model, whose own weights are frozen.
        rank: Rank of the adapter.
        seed: Seed of the adapter's initial weights.
        base: The model's name, folder or id, which is written into the saved adapter.

    Raises:
        ModelError: The package peft is missing.
    """

    def __init__(self, model: PreTrainedModel, rank: int, seed: int, base: str) -> None:
        if find_spec("peft") is None:
            raise ModelError("To train an adapter, install the package peft: pip install peft")
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=rank,
            lora_alpha=ALPHA_PER_RANK * rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            self.module = get_peft_model(model, config)
        self.module.peft_config[ADAPTER_NAME].base_model_name_or_path = base
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in self.module.named_parameters() if weight.requires_grad
        }
        """The trainable weights, float32, by parameter name."""

    def off(self) -> AbstractContextManager[None]:
        """Deactivate the adapter within the `with` block."""
        return self.module.disable_adapter()

    def read(self, folder: Path) -> None:
        """Load the weights that `save` wrote to a folder."""
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self.module, load_peft_weights(str(folder), device="cpu"))

    def save(self, folder: Path) -> None:
        """Write the adapter to a folder, in PEFT's format."""
        self.module.save_pretrained(str(folder), save_embedding_layers=False)
