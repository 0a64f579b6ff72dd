"""Who may read and change what is written on disk: this user alone, or also the group of a folder
that is shared.

A folder is shared if its group may write to it and its set-group-id bit is set (02770): files and
folders made in it are for the group. Those made in any other folder are for this user alone,
whatever the process's umask.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ragfuse.process.folders import OWN_FOLDER, make_own_folder

log = logging.getLogger("ragfuse.store")

_OWN_FILE, _GROUP_FOLDER, _GROUP_FILE = 0o600, 0o2770, 0o660
_SHARED = stat.S_ISGID | stat.S_IWGRP


def make_root(path: Path) -> None:
    """Make a root folder if it is missing, for this user alone, and log a warning if more users
    than intended have access to it.

    Raises:
        OSError: It cannot be made, or something else is there.
    """
    make_own_folder(path)
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXO if _is_shared(mode) else stat.S_IRWXG | stat.S_IRWXO):
        _warn_once(str(path), stat.S_IMODE(mode))


def make_folder(path: Path) -> None:
    """Make a folder below a root if it is missing, with all missing folders in between."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=OWN_FOLDER, exist_ok=True)
    if _is_shared(path.parent.stat().st_mode):
        path.chmod(_GROUP_FOLDER)


def open_file(path: Path, flags: int) -> int:
    """Open a file, which is created if it is missing, and return its descriptor; `flags` are those
    of `os.open`.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, _OWN_FILE)
    share_file(path)
    return fd


def share_file(path: Path) -> None:
    """Open a file that exists to the group of its folder, if the folder is shared; the file itself
    is not opened.
    """
    if _is_shared(path.parent.stat().st_mode):
        with suppress(PermissionError):  # another of the group made it
            path.chmod(_GROUP_FILE)


def _is_shared(mode: int) -> bool:
    return mode & _SHARED == _SHARED


@lru_cache(maxsize=1024)
def _warn_once(path: str, mode: int) -> None:
    """Log, once for each folder, that other users have access to it."""
    log.warning(
        "Other users have access to %s (mode %04o), which holds your documents' texts and their KV."
        " To stop that: chmod go= %s. To share it with its group alone: chmod 2770 %s.",
        path,
        mode,
        path,
        path,
    )
