"""A store's folder: open it or refuse it with a clear error, and lock it during set-up.

Locks are flock(2) locks: the kernel releases them when a process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragfuse.errors import StoreError
from ragfuse.store.access import make_root, open_file


def refusal(path: Path, found: object) -> StoreError:
    """Return the error for a folder that cannot be used, saying what was found and what to do."""
    return StoreError(
        f"The store at {path} cannot be opened: wanted a folder that this user can read and write,"
        f" found {found}. Set RAGFUSE_HOME to another folder (RAGFUSE_STORE or --store: for the"
        " store alone), or free space on its disk and make it usable."
    )


def open_folder(path: Path) -> Path:
    """Create a folder if it is missing, and check that it can be used.

    Args:
        path: The folder.

    Returns:
        Its absolute path, which stays valid if the working directory changes.

    Raises:
        StoreError: It cannot be used.
    """
    path = Path(os.path.abspath(path))
    try:
        make_root(path)
    except FileExistsError as error:
        raise refusal(path, f"a file ({error.filename})") from error
    except OSError as error:
        raise refusal(path, f"{error.strerror} ({error.filename})") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise refusal(path, "one without permission, or on a file system that is read-only")
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
