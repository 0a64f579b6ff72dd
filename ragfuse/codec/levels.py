"""The codec of each level in `types/choices.py`: raw and int8 here, CacheGen in `cachegen.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from ragfuse.codec.cachegen import CacheGenCodec
from ragfuse.codec.codec import DTYPES, Codec, LayerMeta, narrowed, pack, unpack
from ragfuse.codec.coders import BIN_SCALE_DTYPE, from_8bit, to_8bit
from ragfuse.codec.tables import CodecTables
from ragfuse.types.choices import LEVEL_NAMES, LEVELS
from ragfuse.types.kv import LayerKV


@dataclass(frozen=True, slots=True)
class RawCodec:
    """The lossless codec: the bytes of the keys, then the bytes of the values, uncompressed."""

    name: str = "raw"

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Copy a layer into uint8 `[nbytes]`; `at` is ignored."""
        return _copied(
            layer, torch.empty(layer.nbytes, dtype=torch.uint8, device=layer.keys.device)
        )

    def encode_all(self, layers: Sequence[LayerKV]) -> tuple[Tensor, ...]:
        """Copy all layers into one block of host memory; return one view per layer.

        Each view is uint8 `[nbytes]`. Layers of equal size are evenly spaced in the block, so
        `decode_all` can view all layers at once.
        """
        sizes = [layer.nbytes for layer in layers]
        parts = torch.split(torch.empty(sum(sizes), dtype=torch.uint8), sizes)
        return tuple(_copied(layer, part) for layer, part in zip(layers, parts, strict=True))

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Return keys and values as views of `blob`. Never write to the views.

        Raises:
            ValueError: The length of `blob` does not match `meta`.
        """
        return self.decode_all([blob], [meta])[0]

    def decode_all(self, blobs: Sequence[Tensor], metas: Sequence[LayerMeta]) -> list[LayerKV]:
        """Decode several layers, like `decode`.

        Decoding all layers takes as few operations as decoding one layer, if the layers have equal
        shapes and are evenly spaced in one block (see `encode_all`).
        """
        for blob, meta in zip(blobs, metas, strict=True):
            if blob.numel() != meta.decoded_nbytes:
                raise ValueError(
                    f"The layer should have {meta.decoded_nbytes} bytes, but has {blob.numel()}."
                )
        starts = [blob.storage_offset() for blob in blobs]
        step = (starts[-1] - starts[0]) // max(1, len(starts) - 1)
        blocks = {blob.untyped_storage().data_ptr() for blob in blobs}
        shapes = {(meta.key_shape, meta.value_shape, meta.dtype) for meta in metas}
        is_even = step >= 0 and starts == [starts[0] + at * step for at in range(len(starts))]
        if not is_even or len(blocks) > 1 or len(shapes) > 1:
            return [self.decode(blob, meta) for blob, meta in zip(blobs, metas, strict=True)]
        numbers = blobs[0].view(DTYPES[metas[0].dtype])
        at, parts = numbers.storage_offset(), list[Sequence[Tensor]]()
        for shape in (metas[0].key_shape, metas[0].value_shape):
            strides = step // numbers.itemsize, shape[1] * shape[2], shape[2], 1
            parts.append(numbers.as_strided((len(blobs), *shape), strides, at).unbind(0))
            at += prod(shape)
        return [LayerKV(keys, values) for keys, values in zip(*parts, strict=True)]


def _copied(layer: LayerKV, blob: Tensor) -> Tensor:
    """Copy a layer's keys and values into `blob`, uint8 `[nbytes]`; return `blob`."""
    dtype, split = layer.keys.dtype, layer.keys.nbytes
    blob[:split].view(dtype).view(layer.keys.shape).copy_(layer.keys)
    blob[split:].view(dtype).view(layer.values.shape).copy_(layer.values)
    return blob


RAW: Final = RawCodec()
"""The codec of level raw. It has no state, so this instance serves all models."""


@dataclass(frozen=True, slots=True)
class UniformCodec:
    """The codec of level int8: keys and values in 8 bits, with one scale per head and token."""

    name: str = "int8"

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Encode a layer to uint8 `[nbytes]` (see `Codec.encode`).

        Raises:
            ValueError: The layer contains NaN or infinities, which only the raw codec can store.
        """
        parts = list[Tensor]()
        for tensor in (layer.keys, layer.values):
            codes, scales = to_8bit(tensor.float())
            if not scales.isfinite().all():
                raise ValueError(
                    "The layer contains NaN or infinity, which only the level `raw` can store."
                )
            parts += codes.reshape(-1).view(torch.uint8), scales.reshape(-1).view(torch.uint8)
        return pack(at, "", b"", parts)

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Decode a layer (see `Codec.decode`): code times scale, in the dtype of `meta`."""
        _, _, parts = unpack(blob, "")
        dtype = DTYPES[meta.dtype]
        return LayerKV(
            _decoded(parts[:2], meta.key_shape, dtype),
            _decoded(parts[2:4], meta.value_shape, dtype),
        )


def _decoded(parts: tuple[Tensor, ...], shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    codes, scales = parts
    by = scales.clone().view(BIN_SCALE_DTYPE).view(*shape[:2], 1)
    return narrowed(from_8bit(codes.view(torch.int8).view(shape), by), dtype)


INT8: Final = UniformCodec()
"""The codec of level int8. It has no state, so this instance serves all models."""


def codec_for(level: str, tables: CodecTables | None = None) -> Codec:
    """Return the codec of a codec level.

    Args:
        level: Name of the codec level.
        tables: The codec tables of the model. Only CacheGen levels need codec tables.

    Raises:
        ValueError: The level is unknown, or needs codec tables and `tables` is None.
    """
    known = next((each for each in LEVELS if each.name == level), None)
    if known is None:
        raise ValueError(
            f"There is no codec level {level!r}. Use one of: {', '.join(LEVEL_NAMES)}."
        )
    if known.codec == "raw":
        return RAW
    if known.codec == "uniform":
        return INT8
    if tables is None:
        raise ValueError(
            f"Codec level {level!r} needs codec tables: pass `profile_tables(...)` as tables=."
        )
    return CacheGenCodec(tables, known)
