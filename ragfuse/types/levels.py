"""The codec levels that KV may be kept at: the one place that names them. No torch: settings read it, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CodecLevel:
    """One level, as the codec that packs it needs it.

    Args:
        name: What settings, entries and traces call it.
        codec: The codec that packs it: `codec.levels.CODECS` has them by this name.
        bits: Of a `uniform` level: bits of a value.
        bins: Of a `cachegen` level: widths of bins in the first, middle and last third of the layers, in steps of each
            channel (CacheGen 5.2).
    """

    name: str
    codec: Literal["raw", "uniform", "cachegen"] | str
    bits: int = 0
    bins: tuple[float, float, float] = (0.5, 1.0, 1.5)


LEVELS = (
    CodecLevel("raw", "raw"),
    CodecLevel("int8", "uniform", bits=8),
    CodecLevel("cg1", "cachegen", bins=(0.4, 0.4, 0.4)),
    CodecLevel("cg2", "cachegen", bins=(1.0, 1.0, 1.0)),
    CodecLevel("cg3", "cachegen", bins=(1.3, 1.3, 1.3)),
    CodecLevel("cg4", "cachegen", bins=(1.9, 1.9, 1.9)),
)
"""All levels in the order of what they lose: the first loses nothing."""
LEVEL_NAMES = tuple(level.name for level in LEVELS)
"""Their names, in that order."""
