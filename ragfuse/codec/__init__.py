"""ChunkKV to bytes and back, one layer at a time. Nothing here knows where bytes are kept."""

from ragfuse.codec.codec import Codec, LayerMeta, checksum
from ragfuse.codec.container import OtherTables
from ragfuse.codec.levels import LEVELS, codec_for
from ragfuse.codec.raw import RAW, RawCodec
from ragfuse.codec.uniform import INT8, UniformCodec

__all__ = [
    "INT8",
    "LEVELS",
    "RAW",
    "Codec",
    "LayerMeta",
    "OtherTables",
    "RawCodec",
    "UniformCodec",
    "checksum",
    "codec_for",
]
