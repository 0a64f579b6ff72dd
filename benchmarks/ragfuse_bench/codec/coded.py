"""KV through a codec and back: bytes, seconds and what came out; and which codecs there are to
compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ragfuse_bench.codec.few_bits import FewBits

from ragfuse.codec import Codec, LayerMeta, codec_for
from ragfuse.codec.cachegen import CacheGenCodec
from ragfuse.codec.tables import CodecTables
from ragfuse.engine.model_records import made_tables
from ragfuse.hf.model import HFModel
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.kv import ChunkKV

INT8 = "int8"
BASELINES = (FewBits(4), FewBits(3))
"""Uniform quantisation beside the level `int8`: what the paper compares itself with, and no levels
of a store.
"""


@dataclass(frozen=True)
class Coded:
    """What a codec made of KV: what is decoded, and bytes."""

    kv: ChunkKV
    nbytes: int


def coded(codec: Codec, kv: ChunkKV) -> Coded:
    """Every layer encoded and decoded."""
    blobs = [codec.encode(layer, at) for at, layer in enumerate(kv.layers)]
    layers = tuple(
        codec.decode(blob, LayerMeta.of(layer, blob))
        for layer, blob in zip(kv.layers, blobs, strict=True)
    )
    return Coded(ChunkKV(layers), sum(blob.numel() for blob in blobs))


def fp16_nbytes(kv: ChunkKV) -> int:
    """Bytes of the same KV with two bytes a value."""
    return sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in kv.layers)


@dataclass(frozen=True)
class Codecs:
    """What is compared on one model: levels by name, least loss first, and the default level of a
    stream.
    """

    tables: CodecTables
    levels: Mapping[str, Codec]
    default: str

    @property
    def all(self) -> dict[str, Codec]:
        """Levels and baselines."""
        return {**self.levels, **{codec.name: codec for codec in BASELINES}}


def codecs_of(model: HFModel) -> Codecs:
    """The codecs of a model, by the tables in its profile; by those that an engine would make where
    there are none.
    """
    tables = CodecTables.from_dict(model.profile.codec) if model.profile.codec else None
    tables = tables or made_tables(model)
    levels = {name: codec_for(name, tables) for name in LEVEL_NAMES if name != "raw"}
    ours = [name for name, codec in levels.items() if isinstance(codec, CacheGenCodec)]
    return Codecs(tables, levels, ours[(len(ours) - 1) // 2])
