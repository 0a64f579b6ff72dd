"""Weights kept the way oneDNN multiplies them.

A plain bfloat16 product on a CPU lays its weight out anew in every call. A full prefill of a thousand rows hardly
notices; a fused one, of few rows in each of many layers, spends a third of its products on it. Laid out once, the
products are the same up to rounding. float32 gains nothing by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ragfuse.errors import RefusedError
from ragfuse.hf import probe


class PackedLinear(nn.Module):
    """A linear layer, bfloat16 [..., in] -> [..., out], that holds its weight packed and no other copy of it."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", None if plain.bias is None else plain.bias.detach())

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], unpacked for whoever asks: a copy."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        if x.dtype != torch.bfloat16:
            return linear(x, self.weight, self.bias)  # which says what does not fit
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        """As a linear layer shows itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether linear layers of a model there are worth packing and can be."""
    if (device.type, dtype) != ("cpu", torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(model: PreTrainedModel) -> None:
    """Pack the linear layers of a model's decoder layers in place, where that is possible.

    The model is only good for inference afterwards: packed layers have no gradients and cannot be copied or loaded
    anew; what `save_pretrained` writes is as before. Its output layer, which often shares its weight with the
    embedding, stays.
    """
    if not can_pack(model.device, model.dtype):
        return
    try:
        layers = probe.decoder_layers(model)
    except RefusedError:
        return
    packed = 0
    for parent in [module for layer in layers for module in layer.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                packed += child.weight.nbytes
                setattr(parent, name, PackedLinear(child))
    if sum(weight.nbytes for weight in model.parameters()) < packed:
        for weight in model.parameters():  # the file they were read from stays in memory as long as one is a view of it
            weight.data = weight.data.clone()
