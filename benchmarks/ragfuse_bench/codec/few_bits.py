"""Uniform quantisation in 4 or 3 bits: what the paper compares itself with, and no level of a
store.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ragfuse.codec import LayerMeta
from ragfuse.codec.codec import DTYPES, narrowed, pack, unpack
from ragfuse.types.kv import LayerKV

TOGETHER = 8
"""Codes that are packed together: eight codes of any width fill whole bytes."""


@dataclass(frozen=True)
class FewBits:
    """Keys and values as signed codes of `bits` bits, with one bfloat16 scale per head and
    token.
    """

    bits: int

    @property
    def name(self) -> str:
        """Its name beside the levels."""
        return f"int{self.bits}"

    @property
    def _max_code(self) -> int:
        return (1 << self.bits - 1) - 1

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Encode a layer to uint8."""
        parts = [
            part for tensor in (layer.keys, layer.values) for part in self._coded(tensor.float())
        ]
        return pack(at, "", b"", parts)

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Decode a layer: code times scale."""
        keys, key_scales, values, value_scales = unpack(blob, "")[2]
        dtype = DTYPES[meta.dtype]
        return LayerKV(
            narrowed(self._decoded(keys, key_scales, meta.key_shape), dtype),
            narrowed(self._decoded(values, value_scales, meta.value_shape), dtype),
        )

    def _coded(self, exact: Tensor) -> tuple[Tensor, Tensor]:
        scales = (exact.abs().amax(-1, keepdim=True) / self._max_code).to(torch.bfloat16)
        by = scales.float()
        codes = (
            (exact / torch.where(by > 0, by, 1.0)).round().clamp(-self._max_code, self._max_code)
        )
        flat = codes.int().reshape(-1) + self._max_code
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % TOGETHER)).view(-1, TOGETHER)
        at = torch.arange(TOGETHER, device=exact.device)
        words = (padded.long() << self.bits * at).sum(-1, keepdim=True)
        packed = (words >> 8 * at[: self.bits] & 255).to(torch.uint8).reshape(-1)
        return packed, scales.reshape(-1).view(torch.uint8)

    def _decoded(self, stored: Tensor, scales: Tensor, shape: tuple[int, int, int]) -> Tensor:
        at = torch.arange(TOGETHER, device=stored.device)
        words = (stored.view(-1, self.bits).long() << 8 * at[: self.bits]).sum(-1, keepdim=True)
        codes: Tensor = words >> self.bits * at & (1 << self.bits) - 1
        by = scales.clone().view(torch.bfloat16).view(*shape[:2], 1).float()
        return (codes.reshape(-1)[: prod(shape)] - self._max_code).float().view(shape) * by
