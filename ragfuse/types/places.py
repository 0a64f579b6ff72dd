"""Folders, URLs and addresses as settings hold them: absolute, so that a later change of the folder
does not matter.
"""

from __future__ import annotations

import os
from pathlib import Path


def placed_folder(folder: str | Path) -> Path:
    """Return the absolute path of a folder, with `~` expanded."""
    return Path(os.path.abspath(os.path.expanduser(folder)))


def tier_placed(url: str) -> str:
    """Return a tier's URL, with an absolute path where it names a folder of this machine."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return str(placed_folder(url)) if url.strip() else url
    return (
        f"{scheme}://{placed_folder(rest)}" if scheme.lower() in ("file", "local") and rest else url
    )


def model_placed(name: str) -> str:
    """Return the absolute path where a model's name is an existing folder; any other name
    unchanged.
    """
    try:
        is_folder = bool(name.strip()) and os.path.isdir(os.path.expanduser(name))
    except ValueError:  # no path at all
        is_folder = False
    return str(placed_folder(name)) if is_folder else name
