"""Codecs: encode KV to bytes and decode it, one layer at a time (raw, int8, CacheGen)."""

from ragfuse.codec.cachegen import CacheGenCodec
from ragfuse.codec.codec import Codec, LayerMeta, checksum
from ragfuse.codec.container import OtherTables
from ragfuse.codec.levels import codec_for
from ragfuse.codec.profile import profile_tables
from ragfuse.codec.raw import RAW, RawCodec
from ragfuse.codec.tables import CodecTables
from ragfuse.codec.uniform import INT8, UniformCodec

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
