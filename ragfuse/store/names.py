"""The names of an object tier's objects, from which a listing tells the entry that each belongs to.

    chunks/MODEL/TOKENS.CONTEXT.LAYOUT.kv    an entry; each model has a folder, so tenants have different prefixes
    pins/MODEL/TOKENS.CONTEXT.LAYOUT.pin     an empty object that protects an entry from eviction
    uses/MODEL/TOKENS.CONTEXT.LAYOUT.use     an empty object that is rewritten when an entry is used

The parts of a key are digests. Objects with any other name are never touched.
"""

from __future__ import annotations

import re
from sys import intern
from urllib.parse import quote, unquote

from ragfuse.store.bucket import TEMPORARY, Object
from ragfuse.types.keys import ChunkKey

CHUNKS_FOLDER, PINS_FOLDER, USES_FOLDER = "chunks", "pins", "uses"
_KEY = re.compile(r"[0-9a-f]{1,64}\.[0-9a-f]{1,64}\.(?:-|~?[0-9a-f]{0,64})\.[0-9A-Za-z_-]{1,64}")
_ABANDONED_S = 3600.0
_CUT_OFF_S = 24 * 3600.0  # no upload takes as long: it ends after one second per megabyte


def has_name(key: ChunkKey) -> bool:
    """Return whether a key consists of digests, so that it can be parsed back from an object's name."""
    return _KEY.fullmatch(str(key)) is not None


def chunk_name(key: ChunkKey) -> str:
    """Return the name of the object that holds an entry."""
    return _name(key, CHUNKS_FOLDER, ".kv")


def pin_name(key: ChunkKey) -> str:
    """Return the name of the object that pins an entry."""
    return _name(key, PINS_FOLDER, ".pin")


def use_name(key: ChunkKey) -> str:
    """Return the name of the object whose age tells how long ago an entry was used."""
    return _name(key, USES_FOLDER, ".use")


def chunk_key(name: str) -> ChunkKey | None:
    """Return the key of the entry that an object holds, None if its name is not that of an entry."""
    return _key(name, CHUNKS_FOLDER, ".kv")


def pin_key(name: str) -> ChunkKey | None:
    """Return the key of the entry that an object pins, None if its name is not that of a pin."""
    return _key(name, PINS_FOLDER, ".pin")


def use_key(name: str) -> ChunkKey | None:
    """Return the key of the entry whose use an object records, None if its name is not that of a use."""
    return _key(name, USES_FOLDER, ".use")


def is_temporary(name: str) -> bool:
    """Return whether a name is the temporary one under which an entry, pin or use is being written."""
    if not name.endswith(TEMPORARY):
        return False
    whole = name.rsplit(".", 3)[0]  # NAME.TOKEN.SERIAL.tmp
    return bool(chunk_key(whole) or pin_key(whole) or use_key(whole))


def is_abandoned(written: Object, now_s: float) -> bool:
    """Return whether an object that only a running write needs was left behind: it is more than an hour old."""
    return now_s - written.modified > _ABANDONED_S


def is_cut_off(name: str, age_s: float) -> bool:
    """Return whether an upload of this age to the object `name` was interrupted: an entry's, over a day old."""
    return chunk_key(name) is not None and age_s > _CUT_OFF_S


def _name(key: ChunkKey, folder: str, suffix: str) -> str:
    model, rest = str(key).split(".", 1)
    return f"{folder}/{quote(model, safe='~')}/{quote(rest, safe='~')}{suffix}"


def _key(name: str, folder: str, suffix: str) -> ChunkKey | None:
    if not (name.startswith(f"{folder}/") and name.endswith(suffix)):
        return None
    try:
        key = ChunkKey.parse(unquote(name[len(folder) + 1 : -len(suffix)].replace("/", ".")))
    except ValueError:
        return None
    if not has_name(key) or _name(key, folder, suffix) != name:  # another spelling is another object
        return None
    return ChunkKey(intern(key.model), key.tokens, intern(key.context), key.layout)  # few values in many keys
