"""ChunkKV to bytes and back, one layer at a time. Nothing here knows where bytes are kept."""

from ragfuse.codec.codec import Codec, LayerMeta, checksum
from ragfuse.codec.raw import RAW, RawCodec

__all__ = ["RAW", "Codec", "LayerMeta", "RawCodec", "checksum"]
