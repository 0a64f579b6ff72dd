"""Who may read and change what is written on disk: this user alone, or also the group of a folder that is shared.

A folder that its group may write to and whose set-group-id bit is set (02770) is shared: what is made in it is for the
group. What is made in any other folder is for this user alone, whatever the process's umask.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ragfuse.settings import SharedWith

log = logging.getLogger("ragfuse.store")

_OWN_FOLDER, _OWN_FILE, _GROUP_FOLDER, _GROUP_FILE = 0o700, 0o600, 0o2770, 0o660
_SHARED = stat.S_ISGID | stat.S_IWGRP
_OTHERS: tuple[tuple[SharedWith, int], ...] = (("nobody", stat.S_IRWXG | stat.S_IRWXO), ("group", stat.S_IRWXO))


def make_root(path: Path, shared_with: SharedWith = "nobody") -> None:
    """Make a folder that others lie in, unless it is there; one that lets in more than it should is warned about.

    Args:
        path: The folder; those above it that are missing are made as the umask says.
        shared_with: Who else may use it. A folder of this user's that is there already is opened to its group.

    Raises:
        OSError: It cannot be made, or something else is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_OWN_FOLDER, exist_ok=True)
    found = path.stat()
    if shared_with == "group" and not _is_shared(found.st_mode) and found.st_uid == os.geteuid():
        path.chmod(_GROUP_FOLDER)
        found = path.stat()
    if stat.S_IMODE(found.st_mode) & dict(_OTHERS)[shared_with]:
        _warn(str(path), stat.S_IMODE(found.st_mode))


def make_folder(path: Path) -> None:
    """Make a folder below a root, and those that are missing in between, unless it is there."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent)
    try:
        path.mkdir(mode=_OWN_FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    if _is_shared(path.parent.stat().st_mode):
        path.chmod(_GROUP_FOLDER)


def open_file(path: Path, flags: int) -> int:
    """Return a file descriptor of a file, which is made where it is missing; flags: as `os.open` takes them."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, _OWN_FILE)
    if _is_shared(os.stat(path.parent).st_mode):
        with suppress(PermissionError):  # another of the group made it
            os.fchmod(fd, _GROUP_FILE)
    return fd


def _is_shared(mode: int) -> bool:
    return mode & _SHARED == _SHARED


@lru_cache(maxsize=1024)
def _warn(path: str, mode: int) -> None:
    """Say so, once for each folder."""
    log.warning(
        "Others than this user may use %s (mode %04o), where texts of documents and their KV lie. To keep them out: "
        "chmod go= %s. To share it with its group on purpose, set shared_with (environment RAGFUSE_SHARED_WITH=group).",
        path,
        mode,
        path,
    )
