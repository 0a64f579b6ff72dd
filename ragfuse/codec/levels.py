"""The levels that KV may be kept in, by name, and the codec of each."""

from __future__ import annotations

from typing import Final

from ragfuse.codec.codec import Codec
from ragfuse.codec.raw import RAW
from ragfuse.codec.uniform import INT8

LEVELS: Final = ("raw", "int8")
"""Every level by its name, in order of what it loses: the first loses nothing."""


def codec_for(level: str) -> Codec:
    """The codec of a level; ValueError that names all for one that is none."""
    for codec in (RAW, INT8):
        if codec.name == level:
            return codec
    raise ValueError(f"A level ({', '.join(LEVELS)}) wanted, {level!r} found.")
