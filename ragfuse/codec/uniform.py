"""Uniform quantisation to 8, 4 or 3 bits, one scale per head and token. Needs no tables; runs on the layer's device.

8 bits are the level `int8`; 4 and 3 bits are baselines for benchmarks. Scales are per token, not per channel, as a few
tokens (above all the first of a text) are many times larger than the rest and would stretch the scale of every channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

import torch
from torch import Tensor

from ragfuse.codec.codec import DTYPES, LayerMeta
from ragfuse.codec.container import narrowed, pack, refuses_damage, unpack
from ragfuse.types.kv import LayerKV

UNIFORM_KIND: Final = 1
SCALE_DTYPE: Final = torch.bfloat16
"""The dtype of a scale: two bytes with the range of float32, so that no value is too large."""
CODES_PER_GROUP: Final = 8
"""Codes that are packed together: eight codes of any width fill whole bytes."""


@dataclass(frozen=True, slots=True)
class UniformCodec:
    """A codec that stores keys and values as signed codes of `bits` bits, with one scale per head and token."""

    bits: Literal[8, 4, 3] = 8

    @property
    def name(self) -> str:
        """Name of its level: `int8`, or for benchmarks `int4` and `int3`."""
        return f"int{self.bits}"

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Encode a layer to uint8 `[nbytes]` (`Codec.encode`).

        Raises:
            ValueError: The layer holds NaN or infinities, which only the raw codec can store.
        """
        parts = [part for tensor in (layer.keys, layer.values) for part in self._coded(tensor)]
        meta = LayerMeta.of(layer, parts[0])
        return pack(UNIFORM_KIND, at, "", meta, self.bits.to_bytes(16, "little"), parts)

    @refuses_damage
    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Decode a layer (`Codec.decode`): code times scale, in the dtype of `meta`."""
        packed = unpack(blob, UNIFORM_KIND, "", meta)
        if packed.codec_fields != self.bits.to_bytes(16, "little"):
            raise ValueError(f"The layer was not encoded in {self.bits} bits.")
        dtype = DTYPES[meta.dtype]
        keys = self._decoded(packed.parts[0], packed.parts[1], meta.key_shape, dtype)
        return LayerKV(keys, self._decoded(packed.parts[2], packed.parts[3], meta.value_shape, dtype))

    @property
    def _max_code(self) -> int:
        return (1 << self.bits - 1) - 1

    def _coded(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        exact = tensor.float()
        scales = (exact.abs().amax(-1, keepdim=True) / self._max_code).to(SCALE_DTYPE)
        if not scales.isfinite().all():
            raise ValueError("The layer contains NaN or infinity, which only level raw can store.")
        by = scales.float()
        codes = (exact / torch.where(by > 0, by, 1.0)).round().clamp(-self._max_code, self._max_code)
        return self._pack_codes(codes.to(torch.int8)), scales.view(torch.uint8).reshape(-1)

    def _decoded(self, codes: Tensor, scales: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        heads, n, _ = shape
        if codes.numel() != self._nbytes(prod(shape)) or scales.numel() != heads * n * SCALE_DTYPE.itemsize:
            raise ValueError(f"The layer's {self.bits}-bit codes or scales do not fit its shape {shape}.")
        by = scales.clone().view(SCALE_DTYPE).view(heads, n, 1).float()
        return narrowed(self._unpack_codes(codes, prod(shape)).view(shape) * by, dtype)

    def _nbytes(self, count: int) -> int:
        return count if self.bits == 8 else -(-count // CODES_PER_GROUP) * self.bits

    def _pack_codes(self, codes: Tensor) -> Tensor:
        """Pack int8 codes into bytes: 8-bit codes as they are, others eight at a time in `bits` bytes."""
        flat = codes.reshape(-1)
        if self.bits == 8:
            return flat.view(torch.uint8)
        padded = torch.nn.functional.pad(flat.int() + self._max_code, (0, -len(flat) % CODES_PER_GROUP)).view(
            -1, CODES_PER_GROUP
        )
        at = torch.arange(CODES_PER_GROUP, device=codes.device)
        words = (padded.long() << self.bits * at).sum(-1, keepdim=True)
        return (words >> 8 * at[: self.bits] & 255).to(torch.uint8).reshape(-1)

    def _unpack_codes(self, stored: Tensor, count: int) -> Tensor:
        """Unpack the codes, float32 `[count]`."""
        if self.bits == 8:
            return stored.view(torch.int8).float()
        at = torch.arange(CODES_PER_GROUP, device=stored.device)
        words = (stored.view(-1, self.bits).long() << 8 * at[: self.bits]).sum(-1, keepdim=True)
        codes: Tensor = words >> self.bits * at & (1 << self.bits) - 1
        return (codes.reshape(-1)[:count] - self._max_code).float()


INT8: Final = UniformCodec()
"""The codec of level int8. It has no state, so one instance serves all."""
