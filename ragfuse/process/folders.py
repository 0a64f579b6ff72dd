"""Folders that are made for this user alone, whatever the process's umask."""

from __future__ import annotations

from pathlib import Path

OWN_FOLDER = 0o700


def make_own_folder(path: Path) -> None:
    """Make a folder and all missing folders above it with mode 0700; those that exist keep theirs.

    Raises:
        OSError: It cannot be made, or a file is there.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_own_folder(path.parent)
    path.mkdir(mode=OWN_FOLDER, exist_ok=True)
