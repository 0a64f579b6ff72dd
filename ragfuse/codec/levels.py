"""The levels that KV may be kept in, by name, and the codec of each."""

from __future__ import annotations

from typing import Final

from ragfuse.codec.cachegen import CacheGenCodec, Level
from ragfuse.codec.codec import Codec
from ragfuse.codec.raw import RAW
from ragfuse.codec.tables import CodecTables
from ragfuse.codec.uniform import INT8

PACKED: Final = (
    Level("cg1", (0.4, 0.4, 0.4)),
    Level("cg2", (1.0, 1.0, 1.0)),
    Level("cg3", (1.3, 1.3, 1.3)),
    Level("cg4", (1.9, 1.9, 1.9)),
)
"""CacheGen's codec at four widths of bins, the finest first."""
PAPER: Final = Level("paper", deltas=True, odd=0)
"""CacheGen as its paper has it: bins of 0.5, 1 and 1.5 (its C.2), anchors and changes to them."""
LEVEL_NAMES: Final = (RAW.name, INT8.name, *(level.name for level in PACKED))
"""Every level by its name, in order of what it loses: the first loses nothing."""


def codec_for(level: str, tables: CodecTables | None = None) -> Codec:
    """The codec of a level, for the model whose `tables` are given; ValueError for a name that is none.

    `raw` and `int8` need no tables; the others without them are a ValueError, too.
    """
    plain = next((codec for codec in (RAW, INT8) if codec.name == level), None)
    if plain is not None:
        return plain
    packed = next((each for each in PACKED if each.name == level), None)
    if packed is None:
        raise ValueError(f"A level ({', '.join(LEVEL_NAMES)}) wanted, {level!r} found.")
    if tables is None:
        raise ValueError(
            f"Level {level!r} wants its model's codec tables, and there are none: profile the model first."
        )
    return CacheGenCodec(tables, packed)
