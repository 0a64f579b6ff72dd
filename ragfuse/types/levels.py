"""The codec levels at which KV can be stored, named in this one place. Imports no torch, as
settings use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CodecLevel:
    """One codec level and the parameters of its codec.

    Args:
        name: Its name in settings, entries and traces.
        codec: The codec that packs it, as `codec.levels.codec_for` knows it.
        width: Width of the bins of a `cachegen` level, in units of each channel's step
            (CacheGen 5.2).
    """

    name: str
    codec: Literal["raw", "uniform", "cachegen"] | str
    width: float = 1.0


LEVELS = (
    CodecLevel("raw", "raw"),
    CodecLevel("int8", "uniform"),
    CodecLevel("cg1", "cachegen", width=0.4),
    CodecLevel("cg2", "cachegen", width=1.0),
    CodecLevel("cg3", "cachegen", width=1.3),
    CodecLevel("cg4", "cachegen", width=1.9),
)
"""All levels, from the least to the most lossy; the first is lossless."""
LEVEL_NAMES = tuple(level.name for level in LEVELS)
"""The names of all levels, from the least to the most lossy."""


def loss(level: str) -> int:
    """Return the rank of a level by loss, 0 for lossless; an unknown level counts as the
    lossiest.
    """
    return LEVEL_NAMES.index(level) if level in LEVEL_NAMES else len(LEVEL_NAMES)
