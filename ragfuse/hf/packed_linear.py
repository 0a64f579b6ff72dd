"""Linear layers with bfloat16 weights in oneDNN's own layout, for fast matrix products on a CPU.

An ordinary bfloat16 product on a CPU rearranges the weight in every call. For a full prefill of a
thousand tokens, this is negligible. A fused prefill computes few tokens in most layers, and
rearranging then takes a third of the time of the products. A packed weight was rearranged once and
gives equal products up to rounding. float32 weights gain nothing from packing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragfuse.hf import probe

_product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """A linear layer, bfloat16 [..., in] -> [..., out], that stores only the packed weight."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        # Not buffers: a buffer's lookup takes a tenth of the time of a product with one token.
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())
        self.bias: Tensor | None = None if plain.bias is None else plain.bias.detach()

    @property
    def weight(self) -> Tensor:
        """An unpacked copy of the weight [out, in], made at each access."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        return _product(x, self.packed, self.bias, "none", [], "")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias
        super()._save_to_state_dict(destination, prefix, keep_vars)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether linear layers of this dtype and device can be packed and become faster."""
    if (device.type, dtype) != ("cpu", torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack(model: PreTrainedModel) -> None:
    """Pack the linear layers of the decoder and the output layer in place, if possible.

    Afterwards the model is for inference only. Packed layers have no gradients, cannot be copied,
    and cannot load weights. `save_pretrained` still writes ordinary weights. An output layer that
    shares its weight with the embedding is packed as a copy. The copy is worth its memory,
    because the output layer takes a tenth of the time per token in a small model.
    """
    if not can_pack(model.device, model.dtype):
        return
    packed = 0
    for parent in [each for layer in probe.decoder_layers(model) for each in layer.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                packed += child.weight.nbytes
                setattr(parent, name, PackedLinear(child))
    output = model.get_output_embeddings()
    if type(output) is nn.Linear and output.weight.dtype == torch.bfloat16:
        model.set_output_embeddings(PackedLinear(output))
    if sum(weight.nbytes for weight in model.parameters()) < packed:
        # copies the other weights, because views would keep the memory-mapped file open
        for weight in model.parameters():
            weight.data = weight.data.clone()
