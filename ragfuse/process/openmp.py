"""One pool of compute threads at a time, because more of them than CPUs make each of torch's
operations wait.

libgomp, which torch brings for CPUs on Linux, keeps a pool of threads for each thread that has
computed. While all pools together have more threads than there are CPUs, idle pools too, its
threads sleep between two operations instead of spinning: a token then takes nearly twice as long.
So a thread that leaves computing to another releases its pool. Other builds of torch have no such
pools, and nothing here has an effect.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

_SOFT = 1  # omp_pause_soft: what `omp_set_num_threads` has set stays


def release_pool() -> None:
    """Release this thread's pool of compute threads; it starts another one when it computes
    again.
    """
    if (libgomp := _libgomp()) is not None:
        libgomp.omp_pause_resource_all(_SOFT)


def use_threads(count: int) -> None:
    """Set by how many threads operations of this thread are computed, without an effect on
    others.
    """
    if (libgomp := _libgomp()) is not None:
        libgomp.omp_set_num_threads(count)


def _libgomp() -> ctypes.CDLL | None:
    """Return torch's libgomp; None where torch is not loaded, uses none, or one older than OpenMP
    5.
    """
    torch = sys.modules.get("torch")
    return _loaded(Path(str(torch.__file__)).parent) if torch is not None else None


@cache
def _loaded(folder: Path) -> ctypes.CDLL | None:
    files = [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]
    libgomp = ctypes.CDLL(str(files[0])) if files else None
    return libgomp if hasattr(libgomp, "omp_pause_resource_all") else None
