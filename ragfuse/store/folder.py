"""A store's folder: open it or refuse it with a clear error, and lock it during set-up.

Locks are flock(2) locks: the kernel releases them when a process dies, however it dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragfuse.errors import StoreError
from ragfuse.settings import SharedWith
from ragfuse.store.access import make_root, open_file

FULL_DISK = "a full disk"
"""What is found where a disk has no free space, for error messages."""


CRAMPED_NBYTES = 1 << 18
"""Free bytes on a disk below which an error of SQLite, which does not say more, is put down to a lack of room."""


def is_full(path: Path, error: Exception) -> bool:
    """Return whether an error that occurred at `path` came from a disk without room."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not isinstance(error, sqlite3.OperationalError):
        return False
    with suppress(OSError):
        free = os.statvfs(path)
        if free.f_bavail * free.f_frsize < CRAMPED_NBYTES:
            return True
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL


def refusal(path: Path, found: str) -> StoreError:
    """Return the error for a folder that cannot be used, saying what was found and what to do."""
    mend = "free space" if found == FULL_DISK else "make this one usable"
    return StoreError(
        f"The store at {path} cannot be opened: wanted a folder that this user can read and write, found {found}. "
        f"Set RAGFUSE_HOME to another folder (RAGFUSE_STORE or --store: for the store alone), or {mend}."
    )


def describe_error(path: Path, error: Exception, where: str = "") -> str:
    """Describe an error that occurred in `path`. A full disk is named as such, as SQLite reports it as an I/O error."""
    return FULL_DISK if is_full(path, error) else f"an error{where} ({error})"


def open_folder(path: Path, shared_with: SharedWith = "nobody") -> Path:
    """Create a folder if it is missing, and check that it can be used.

    Args:
        path: The folder.
        shared_with: Who else may use it.

    Returns:
        Its absolute path, which stays valid if the working directory changes.

    Raises:
        StoreError: It cannot be used.
    """
    path = Path(os.path.abspath(path))
    try:
        make_root(path, shared_with)
    except FileExistsError as error:
        raise refusal(path, f"a file ({error.filename})") from error
    except OSError as error:
        raise refusal(path, f"{error.strerror} ({error.filename})") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise refusal(
            path, "one on a file system that is read-only" if _is_read_only(path) else "one without permission"
        )
    return path


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


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
