"""The small steps of a Llama's layers, compiled: norms, gates and rotation, in as few passes over
memory as they need.

Beside the adapted products they are what costs most on a CPU. Results are the same up to rounding.
"""

from __future__ import annotations

from types import MethodType

import torch
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


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
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def lean(model: torch.nn.Module) -> None:
    """Give a Llama the steps above, in place."""
    modeling_llama.apply_rotary_pos_emb = _rope
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = MethodType(
                lambda self, x: _normed(x, self.weight, self.variance_epsilon), module
            )
        elif isinstance(module, LlamaMLP):
            module.forward = MethodType(
                lambda self, x: self.down_proj(_gated(self.gate_proj(x), self.up_proj(x))), module
            )
