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
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ragfuse.process.folders import make_own_folder
from ragfuse.types.keys import digest

DIGESTS = re.compile("([0-9a-f]{32}) ([0-9a-f]{32})")


def identity(places: Iterable[Path], options: Mapping[str, Any]) -> str:
    """Return a name for the weights in some folders or files as they are now; "" if JSON cannot
    represent `options` or a file is missing.

    Args:
        places: The files, or the folders with them.
        options: The options that the weights are loaded with.
    """
    try:
        options_json = json.dumps(dict(options), sort_keys=True)
        under = (
            path for place in places for path in ([place] if place.is_file() else place.rglob("*"))
        )
        files = sorted({path.resolve() for path in under if path.is_file()})
        stats = [(str(path), path.stat()) for path in files]
    except (TypeError, ValueError, OSError):
        return ""
    lines = [
        f"{path} {at.st_size} {at.st_ino} {at.st_mtime_ns} {at.st_ctime_ns}" for path, at in stats
    ]
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers")]
    return digest("weights", options_json, *libraries, *lines) if lines else ""


def kept_file(home: Path | None, places: Iterable[Path], options: Mapping[str, Any]) -> Path | None:
    """Return the file in `home` that keeps the digests of weights as they are now (`identity`);
    None where none can.
    """
    name = identity(places, options) if home is not None else ""
    return home.expanduser() / "fingerprints" / name if home is not None and name else None


def kept_digests(file: Path) -> tuple[str, str] | None:
    """Return the digests of weights and tokenizer in a file; None where it cannot be read."""
    try:
        found = DIGESTS.fullmatch(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return (found[1], found[2]) if found else None


def keep_digests(file: Path, weights: str, words: str) -> None:
    """Keep the digests of weights and tokenizer if possible."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        make_own_folder(file.parent)
        partial.write_text(f"{weights} {words}", encoding="ascii")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
