"""Codecs (raw, int8, CacheGen): encode KV to bytes and decode it, one layer at a time."""

from ragfuse.codec.cachegen import CacheGenCodec, profile_tables
from ragfuse.codec.codec import Codec, LayerMeta, OtherTables, checksum
from ragfuse.codec.levels import INT8, RAW, RawCodec, UniformCodec, codec_for
from ragfuse.codec.tables import CodecTables

__all__ = [
    "INT8",
    "RAW",
    "CacheGenCodec",
    "Codec",
    "CodecTables",
    "LayerMeta",
    "OtherTables",
    "RawCodec",
    "UniformCodec",
    "checksum",
    "codec_for",
    "profile_tables",
]
