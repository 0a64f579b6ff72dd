"""Files that others may have put there: opened without waiting, and read no further than there is something.

A folder may hold a pipe, on which opening waits for ever, a link to a file of somebody else's, or a file that says to
be a terabyte and has a page on the medium.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

SPARSE_NBYTES = 1 << 20
"""Up to so many bytes nobody asks whether they are there."""
MAX_SPARSE_FACTOR = 64
"""Times the bytes on the medium that a part of a file may have: less where most of it was never written."""
_EXTENTS = 4096


def open_plain(path: str | Path, *, follow: bool = False) -> int:
    """Open a plain file to be read; its descriptor. ValueError for what is none: a pipe, a device, a folder, a link.

    follow: a link to a plain file is as good. OSError as `os.open` has it.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK, errno.EOPNOTSUPP):  # a link, a socket
            raise ValueError("it is no plain file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it is no plain file")
    return fd


def check_there(fd: int, begin: int, end: int) -> None:
    """ValueError where most of a part of a file was never written: before memory is taken for it."""
    if (
        end - begin > SPARSE_NBYTES
        and hasattr(os, "SEEK_DATA")
        and MAX_SPARSE_FACTOR * _written(fd, begin, end) < end - begin
    ):
        raise ValueError(f"{end - begin} bytes wanted, found a hole in the file")


def next_written(fd: int, at: int, size: int) -> int:
    """Where a file of `size` bytes has something on the medium again, from `at` on; its size where nothing follows."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA) if hasattr(os, "SEEK_DATA") else at
    except OSError as error:
        return size if error.errno == errno.ENXIO else at


def _written(fd: int, begin: int, end: int) -> int:
    """Bytes of a part that are on the medium, counted until they are enough."""
    found, at = 0, begin
    with suppress(OSError):  # nothing more is written behind; where a medium knows of no holes, there are none
        for _ in range(_EXTENTS):
            lo = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, lo, os.SEEK_HOLE)
            found += max(0, min(at, end) - lo)
            if at >= end or MAX_SPARSE_FACTOR * found >= end - begin:
                break
    return found


def remove(path: Path) -> None:
    """Remove a file, a link or a pipe; what is not there is gone, and a folder is somebody else's and stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if not path.is_dir():
            raise
