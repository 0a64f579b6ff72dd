"""The frozen layers of a Llama with a LoRA adapter, in as few passes over memory as they need.

Peft's own layers cast activations to the adapter's float32 and back, and scale and add over whole outputs; on a CPU
that, with norms and gates in many small steps, costs more than the products. Results are the same up to rounding.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch.autograd.function import once_differentiable
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


class Adapted(torch.autograd.Function):
    """x [T, in] through weight [out, in] and s·B·A beside it: A [r, in], B [out, r] float32, x and weight bfloat16."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[T, out]."""
        down, up = a.to(x.dtype), (b * scale).to(x.dtype)
        inner = x @ down.T
        ctx.save_for_backward(x, weight, down, up, inner)
        ctx.scale = scale
        return (x @ weight.T).addmm_(inner, up.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, None]:
        """Gradients of x, A and B."""
        x, weight, down, up, inner = ctx.saved_tensors
        back = grad @ up
        return (
            (grad @ weight).addmm_(back, down),
            None,
            (back.T @ x).float(),
            (grad.T @ inner).float() * ctx.scale,
            None,
        )


def _adapted(self: Linear, x: torch.Tensor) -> torch.Tensor:
    a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
    rows = Adapted.apply(x.flatten(0, -2), self.base_layer.weight, a, b, self.scaling["default"])
    return rows.view(*x.shape[:-1], -1)


@torch.compile(dynamic=True)
def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@torch.compile(dynamic=True)
def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


@torch.compile(dynamic=True)
def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def _rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def lean(model: torch.nn.Module) -> None:
    """Give a Llama under peft the layers above, in place."""
    modeling_llama.apply_rotary_pos_emb = _rope
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = MethodType(_adapted, module)
        elif isinstance(module, LlamaRMSNorm):
            module.forward = MethodType(lambda self, x: _normed(x, self.weight, self.variance_epsilon), module)
        elif isinstance(module, LlamaMLP):
            module.forward = MethodType(
                lambda self, x: self.down_proj(_gated(self.gate_proj(x), self.up_proj(x))), module
            )
