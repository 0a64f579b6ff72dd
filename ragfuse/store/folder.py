"""A store's folder: open it or refuse it, lock it during set-up, give its files to their users.

A folder is shared if its group may write to it and its set-group-id bit is set (02770): files and
folders made in it are for the group, all others for this user alone, whatever the umask. Locks are
flock(2) locks, which the kernel releases when a process dies.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from ragfuse.errors import StoreError
from ragfuse.process.folders import OWN_FOLDER, make_own_folder

log = logging.getLogger("ragfuse.store")

_OWN_FILE, _GROUP_FOLDER, _GROUP_FILE = 0o600, 0o2770, 0o660
_SHARED = stat.S_ISGID | stat.S_IWGRP


def make_root(path: Path) -> None:
    """Make a root folder for this user alone if it is missing; log a warning if more users than
    intended have access to it.
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
    """Open a file with flags of `os.open`, make it if it is missing, return its descriptor."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, _OWN_FILE)
    share_file(path)
    return fd


def share_file(path: Path) -> None:
    """Open a file to the group of a shared folder, without opening the file itself."""
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


def refusal(path: Path, found: object) -> StoreError:
    """Return the error for a folder that cannot be used, saying what was found and what to do."""
    return StoreError(
        f"The store at {path} cannot be opened: wanted a folder that this user can read and write,"
        f" found {found}. Correct that, or set another one: --store, RAGFUSE_STORE, RAGFUSE_HOME."
    )


def open_folder(path: Path) -> Path:
    """Make a folder if missing; return its absolute path, or raise StoreError if unusable."""
    path = Path(os.path.abspath(path))
    try:
        make_root(path)
    except FileExistsError as error:
        raise refusal(path, f"a file ({error.filename})") from error
    except OSError as error:
        raise refusal(path, f"{error.strerror} ({error.filename})") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise refusal(path, "one without that permission, or a read-only file system")
    return path


def fsync_folder(path: Path) -> None:
    """Sync a folder, so that file names created in it survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on a file while the block runs: one process at a time, and one thread."""
    fd = open_file(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
