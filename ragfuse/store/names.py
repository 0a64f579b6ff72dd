"""How an object tier names its objects, so that a listing tells whose they are. Names only, no I/O and no clock.

    chunks/MODEL/TOKENS.CONTEXT.LAYOUT.kv    an entry: a folder for each model, to tell tenants apart by prefix
    pins/MODEL/TOKENS.CONTEXT.LAYOUT.pin     an empty object that protects one

What has another name is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import intern
from urllib.parse import quote, unquote

from ragfuse.core import ChunkKey
from ragfuse.store.bucket import TEMPORARY, Object

CHUNKS, PINS = "chunks", "pins"
_ABANDONED_S = 3600.0


def chunk_name(key: ChunkKey) -> str:
    """The object that holds an entry."""
    return _name(key, CHUNKS, ".kv")


def pin_name(key: ChunkKey) -> str:
    """The object that protects it."""
    return _name(key, PINS, ".pin")


def sort_names(found: Mapping[str, Object], now_s: float) -> tuple[dict[ChunkKey, Object], set[ChunkKey], list[str]]:
    """A listing as objects by key, pinned keys, and names of what nobody needs: left behind an hour ago or more."""
    objects = {key: each for name, each in found.items() if (key := _key(name, CHUNKS, ".kv"))}
    pins = {name: key for name in found if (key := _key(name, PINS, ".pin"))}
    left = [name for name in found if name.startswith(f"{CHUNKS}/") and name.endswith(TEMPORARY)]
    left += [name for name, key in pins.items() if key not in objects]
    return objects, set(pins.values()), [name for name in left if now_s - found[name].modified > _ABANDONED_S]


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
    if _name(key, folder, suffix) != name:  # another spelling of a name that is its own object
        return None
    return ChunkKey(intern(key.model), key.tokens, intern(key.context), key.layout)  # few, and there may be a million
