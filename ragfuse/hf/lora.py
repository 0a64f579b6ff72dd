"""LoRA adapters that are trained: put beside a model's linear layers, switched off, saved and read as PEFT does.

The layers compute what PEFT's own do, in fewer passes over memory: those cast activations to the adapter's float32 and
back, and scale and add over whole outputs, which on a CPU costs as much as the products.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ragfuse.errors import ModelError
from ragfuse.hf.chunk_adapter import ADAPTER_WEIGHTS

ADAPTER_NAME = "default"
ALPHA_PER_RANK = 2
"""The adapter's output is scaled by `lora_alpha / r`, which is this."""


class AdaptedProduct(torch.autograd.Function):
    """The product of x [T, in] with weight [out, in] plus scale·B·A; A [r, in] and B [out, r] are float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return [T, out] in x's dtype."""
        down, up = a.to(x.dtype), (b * scale).to(x.dtype)
        inner = x @ down.T
        ctx.save_for_backward(x, weight, down, up, inner)
        ctx.scale = scale
        return (x @ weight.T).addmm_(inner, up.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        """Return the gradients of x, A and B."""
        x, weight, down, up, inner = ctx.saved_tensors
        back = grad @ up
        to_x = (grad @ weight).addmm_(back, down) if ctx.needs_input_grad[0] else None
        return to_x, None, (back.T @ x).to(torch.float32), (grad.T @ inner).to(torch.float32) * ctx.scale, None


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Stand in for the forward of a PEFT layer."""
    base = layer.base_layer
    if layer.disable_adapters:
        out: Tensor = base(x)
        return out
    a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
    rows: Tensor = AdaptedProduct.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), base.weight, a, b, layer.scaling[ADAPTER_NAME]
    )
    out = rows.view(*x.shape[:-1], -1)
    return out if base.bias is None else out + base.bias


def lean(model: nn.Module) -> None:
    """Give the adapted linear layers of a model the forward above, in place; quantised ones keep PEFT's."""
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if isinstance(module, Linear) and type(module.base_layer) is nn.Linear:
            setattr(module, "forward", MethodType(_forward, module))  # noqa: B010 - of this module alone


class LoraAdapter:
    """A LoRA adapter on all linear layers of a model's decoder, put there in place; at first it changes nothing.

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
            raise ModelError("Training an adapter needs the package peft, which is not installed: pip install peft")
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
            self._peft = get_peft_model(model, config)
        self._peft.peft_config[ADAPTER_NAME].base_model_name_or_path = base
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in self._peft.named_parameters() if weight.requires_grad
        }
        """The trained weights, float32, by name."""
        for weight in self.weights.values():
            weight.data = weight.data.float()
        lean(model)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapter off in this context, so that the model computes as it did without it."""
        with self._peft.disable_adapter():
            yield

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights by name, as `weights` has them."""
        for name, weight in self.weights.items():
            weight.data.copy_(weights[name])

    def read(self, folder: Path) -> None:
        """Take over the weights that `save` wrote into a folder."""
        saved = load_file(folder / ADAPTER_WEIGHTS)
        self.load({name: saved[_saved_name(name)] for name in self.weights})

    def save(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter into a folder, in PEFT's form; other weights than its own may be given by name."""
        config = self._peft.peft_config[ADAPTER_NAME]
        was, config.inference_mode = config.inference_mode, True
        targets, config.target_modules = config.target_modules, sorted(config.target_modules)
        try:
            config.save_pretrained(str(folder))
        finally:
            config.inference_mode, config.target_modules = was, targets
        named = weights if weights is not None else self.weights
        saved = {_saved_name(name): weight.detach().float().cpu().contiguous() for name, weight in named.items()}
        save_file(saved, folder / ADAPTER_WEIGHTS)


def _saved_name(name: str) -> str:
    """Return the name of a weight in PEFT's files, which leave the adapter's own name out."""
    return name.replace(f".{ADAPTER_NAME}.", ".")
