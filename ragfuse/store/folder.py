"""Open, check and lock a store's folder, and set the access modes of the files in it.

A folder is shared if its group has write permission and its set-group-id bit is set (02770). The
group has access to files and folders in a shared folder. All other files and folders are accessible
to this user only, whatever the umask. Locks are flock(2) locks, which the kernel releases when a
process dies.
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
    """Create a store's folder for this user only. If other users have access to an existing
    folder, log a warning. Access by the group of a shared folder causes no warning.
    """
    make_own_folder(path)
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXO if _is_shared(mode) else stat.S_IRWXG | stat.S_IRWXO):
        _warn_once(str(path), stat.S_IMODE(mode))


def make_folder(path: Path) -> None:
    """Create a folder inside a store's folder, with missing parents."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=OWN_FOLDER, exist_ok=True)
    if _is_shared(path.parent.stat().st_mode):
        path.chmod(_GROUP_FOLDER)


def open_file(path: Path, flags: int) -> int:
    """Open a file with the given flags of `os.open`; create a missing file. Return a descriptor."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, _OWN_FILE)
    share_file(path)
    return fd


def share_file(path: Path) -> None:
    """Give the group access to a file in a shared folder, without opening the file."""
    if _is_shared(path.parent.stat().st_mode):
        with suppress(PermissionError):  # another user of the group created the file
            path.chmod(_GROUP_FILE)


def _is_shared(mode: int) -> bool:
    return mode & _SHARED == _SHARED


@lru_cache(maxsize=1024)
def _warn_once(path: str, mode: int) -> None:
    """Log that other users have access to a folder, once per folder and mode."""
    log.warning(
        "Other users have access to %s (mode %04o), which holds your documents' texts and their"
        " KV. To make the folder private, run: chmod go= %s. To share the folder with its group"
        " only, run: chmod 2770 %s.",
        path,
        mode,
        path,
        path,
    )


def refusal(path: Path, found: object) -> StoreError:
    """Return a StoreError that states why a folder is unusable (`found`) and gives advice."""
    return StoreError(
        f"The store at {path} cannot be used: {found}. Correct this, or choose another folder"
        " with --store, RAGFUSE_STORE or RAGFUSE_HOME."
    )


def open_folder(path: Path) -> Path:
    """Create a folder if missing; return its absolute path. Raise StoreError if it is unusable."""
    path = Path(os.path.abspath(path))
    try:
        make_root(path)
    except FileExistsError as error:
        raise refusal(path, f"{error.filename} is a file, not a folder") from error
    except OSError as error:
        raise refusal(path, f"{error.strerror} ({error.filename})") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise refusal(path, "no permission to write there, or a read-only file system")
    return path


def fsync_folder(path: Path) -> None:
    """Sync a folder, so that new file names in it survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock during the `with` block; other processes and threads wait."""
    fd = open_file(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
