"""How an object tier names its objects, so that a listing tells whose they are. Names only, no I/O and no clock.

    chunks/MODEL/TOKENS.CONTEXT.LAYOUT.kv    an entry: a folder for each model, to tell tenants apart by prefix
    pins/MODEL/TOKENS.CONTEXT.LAYOUT.pin     an empty object that protects one
    uses/MODEL/TOKENS.CONTEXT.LAYOUT.use     an empty object, written when one was used

What has another name is left alone, and so is what is called so and is no digest: keys are digests alone.
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
_CUT_OFF_S = 24 * 3600.0  # a put takes a second for each megabyte at most


def has_name(key: ChunkKey) -> bool:
    """Tell whether an entry's objects have names that are known again: its key is of digests."""
    return _KEY.fullmatch(str(key)) is not None


def chunk_name(key: ChunkKey) -> str:
    """The object that holds an entry."""
    return _name(key, CHUNKS_FOLDER, ".kv")


def pin_name(key: ChunkKey) -> str:
    """The object that protects it."""
    return _name(key, PINS_FOLDER, ".pin")


def use_name(key: ChunkKey) -> str:
    """The object whose age tells how long ago it was used."""
    return _name(key, USES_FOLDER, ".use")


def chunk_key(name: str) -> ChunkKey | None:
    """Whose entry an object holds, None if it is none."""
    return _key(name, CHUNKS_FOLDER, ".kv")


def pin_key(name: str) -> ChunkKey | None:
    """Whom an object protects, None if it is no pin."""
    return _key(name, PINS_FOLDER, ".pin")


def use_key(name: str) -> ChunkKey | None:
    """Whose use an object tells of, None if of none."""
    return _key(name, USES_FOLDER, ".use")


def is_temporary(name: str) -> bool:
    """Whether an object is what a writer of one of ours has begun with."""
    if not name.endswith(TEMPORARY):
        return False
    whole = name.rsplit(".", 3)[0]  # NAME.TOKEN.SERIAL.tmp
    return bool(chunk_key(whole) or pin_key(whole) or use_key(whole))


def is_abandoned(written: Object, now_s: float) -> bool:
    """Whether what only a writer under way needs was left behind: written an hour ago or more."""
    return now_s - written.modified > _ABANDONED_S


def is_cut_off(name: str, age_s: float) -> bool:
    """Whether what was uploaded so long for the object of this name, one of ours, will never be whole."""
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
    if not has_name(key) or _name(key, folder, suffix) != name:  # another spelling is its own object
        return None
    return ChunkKey(intern(key.model), key.tokens, intern(key.context), key.layout)  # few, and there may be a million
