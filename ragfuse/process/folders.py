"""Folders: absolute paths, folders that only this user can read, and a temporary folder."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


def placed_folder(folder: str | Path) -> Path:
    """Return the absolute path of a folder, with `~` expanded."""
    return Path(os.path.abspath(os.path.expanduser(folder)))


def tier_placed(url: str) -> str:
    """Return a tier's URL, with an absolute path if the URL names a local folder."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return str(placed_folder(url)) if url.strip() else url
    return (
        f"{scheme}://{placed_folder(rest)}" if scheme.lower() in ("file", "local") and rest else url
    )


def model_placed(name: str) -> str:
    """If `name` is an existing folder, return its absolute path. Otherwise return `name`."""
    try:
        is_folder = bool(name.strip()) and os.path.isdir(os.path.expanduser(name))
    except ValueError:  # not a valid path
        is_folder = False
    return str(placed_folder(name)) if is_folder else name


OWN_FOLDER = 0o700


def make_own_folder(path: Path) -> None:
    """Make a folder and its missing parents with mode 0700. Existing folders are not changed."""
    if path.is_dir():
        return
    if path.parent != path:
        make_own_folder(path.parent)
    path.mkdir(mode=OWN_FOLDER, exist_ok=True)


def can_be_written(path: Path) -> bool:
    """Return False if this user can neither write to the folder nor create it."""
    existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
    return True


def give_temporary_files_a_place() -> None:
    """Use /dev/shm for temporary files (torch needs some) if no usual folder is writable."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = "/dev/shm"


@cache
def temporary_folder() -> Path:
    """Return this process's temporary folder, which is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="ragfuse-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
