"""The codec of each codec level in `types/choices.py`."""

from __future__ import annotations

from ragfuse.codec.cachegen import CacheGenCodec
from ragfuse.codec.codec import Codec
from ragfuse.codec.raw import RAW
from ragfuse.codec.tables import CodecTables
from ragfuse.codec.uniform import INT8
from ragfuse.types.choices import LEVEL_NAMES, LEVELS


def codec_for(level: str, tables: CodecTables | None = None) -> Codec:
    """Return the codec of a level.

    Args:
        level: Name of the level.
        tables: The codec tables of the model; only CacheGen levels need them.

    Raises:
        ValueError: There is no level of that name, or it needs tables and there are none.
    """
    known = next((each for each in LEVELS if each.name == level), None)
    if known is None:
        raise ValueError(
            f"There is no codec level {level!r}. Levels are: {', '.join(LEVEL_NAMES)}."
        )
    if known.codec == "raw":
        return RAW
    if known.codec == "uniform":
        return INT8
    if tables is None:
        raise ValueError(
            f"Level {level!r} needs codec tables of the model, found none. Pass those of"
            " `profile_tables`."
        )
    return CacheGenCodec(tables, known)
