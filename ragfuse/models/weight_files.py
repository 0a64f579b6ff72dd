"""A cache of digests of weights and tokenizers, by the identity of the files that they were read
from.

Hashing a large model takes seconds, and writing out a tokenizer a fifth of one. Files whose path,
size, inode and times are unchanged hold the same bytes, so their digest is written to the user's
cache once and read from there when they are loaded again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ragfuse.process.folders import make_own_folder
from ragfuse.types.keys import digest

DIGESTS = re.compile("([0-9a-f]{32}) ([0-9a-f]{32})")
SETTLED_NS = 2_000_000_000
"""The least age of the newest file, in nanoseconds, for a digest to be kept.

A later change within the same clock tick would not show in the file's times.
"""


def identity(places: Iterable[Path], options: Mapping[str, Any]) -> tuple[str, int]:
    """Return a name for the weights in some folders or files, and when the newest file changed.

    Args:
        places: The files, or the folders with them.
        options: The options that the weights are loaded with.

    Returns:
        (name, nanoseconds since 1970); ("", 0) if JSON cannot represent `options` or a file is
        missing.
    """
    try:
        options_json = json.dumps(dict(options), sort_keys=True)
        under = (
            path for place in places for path in ([place] if place.is_file() else place.rglob("*"))
        )
        files = sorted({path.resolve() for path in under if path.is_file()})
        stats = [(str(path), path.stat()) for path in files]
    except (TypeError, ValueError, OSError):
        return "", 0
    lines = [
        f"{path} {at.st_size} {at.st_ino} {at.st_mtime_ns} {at.st_ctime_ns}" for path, at in stats
    ]
    changed = max((max(at.st_mtime_ns, at.st_ctime_ns) for _, at in stats), default=0)
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers")]
    return (digest("weights", options_json, *libraries, *lines), changed) if lines else ("", 0)


def kept_digests(file: Path) -> tuple[str, str] | None:
    """Return the digests of weights and tokenizer in a file; None where it cannot be read."""
    try:
        found = DIGESTS.fullmatch(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return (found[1], found[2]) if found else None


def keep_digests(file: Path, weights: str, words: str, changed_ns: int) -> None:
    """Keep the digests of weights and tokenizer if possible, unless their files changed less than
    `SETTLED_NS` ago.
    """
    if time.time_ns() - changed_ns < SETTLED_NS:
        return
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        make_own_folder(file.parent)
        partial.write_text(f"{weights} {words}", encoding="ascii")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
