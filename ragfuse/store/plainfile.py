"""Safe access to files in a folder that others can write to.

Such a folder may hold a pipe, which blocks for ever when it is opened, a link to another user's file, or a sparse file
that claims a terabyte and occupies one block of the disk.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SPARSE_NBYTES = 1 << 20
"""Bytes up to which `check_there` accepts any range without a check."""
MAX_SPARSE_FACTOR = 64
"""Most times that a range may be longer than the part of it that is on disk; the rest are holes."""
_EXTENTS = 4096


def open_plain(path: str | Path, *, follow: bool = False) -> int:
    """Open a plain file for reading, without blocking.

    Args:
        path: The file.
        follow: Whether a link to a plain file is allowed.

    Returns:
        The file descriptor, which the caller closes.

    Raises:
        ValueError: It is not a plain file but a pipe, a device, a folder or a link.
        OSError: As raised by `os.open`.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK, errno.EOPNOTSUPP):  # a link, a socket
            raise ValueError("it is not a plain file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it is not a plain file")
    return fd


def check_there(fd: int, begin: int, end: int) -> None:
    """Raise ValueError if most of the bytes `begin` to `end` of a file are a hole. Call it before allocating memory.

    The position of the descriptor stays where it is, as a buffered reader of the same file relies on it.
    """
    if (
        end - begin > SPARSE_NBYTES
        and hasattr(os, "SEEK_DATA")
        and MAX_SPARSE_FACTOR * _written(fd, begin, end) < end - begin
    ):
        raise ValueError(f"most of its {end - begin} bytes are missing: there is a hole in the file")


def next_written(fd: int, at: int, size: int) -> int:
    """Return the first offset from `at` on that is not in a hole of a file of `size` bytes; `size` if there is none.

    The position of the descriptor stays where it is.
    """
    try:
        with _position_kept(fd):
            return os.lseek(fd, at, os.SEEK_DATA) if hasattr(os, "SEEK_DATA") else at
    except OSError as error:
        return size if error.errno == errno.ENXIO else at


def _written(fd: int, begin: int, end: int) -> int:
    """Count the bytes of a range that are not in a hole, stopping once there are enough for `MAX_SPARSE_FACTOR`."""
    found, at = 0, begin
    # OSError is raised if only a hole follows; a file system without holes reports none
    with _position_kept(fd), suppress(OSError):
        for _ in range(_EXTENTS):
            lo = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, lo, os.SEEK_HOLE)
            found += max(0, min(at, end) - lo)
            if at >= end or MAX_SPARSE_FACTOR * found >= end - begin:
                break
    return found


@contextmanager
def _position_kept(fd: int) -> Iterator[None]:
    """Seek back at the end: looking for holes moves a descriptor, behind the back of a reader that buffers it."""
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        os.lseek(fd, position, os.SEEK_SET)


def remove(path: Path) -> None:
    """Remove a file, a link or a pipe if it exists. A folder is never removed: the store does not create one there."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if not path.is_dir():
            raise
