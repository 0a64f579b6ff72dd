"""The end of the process waits for threads that compute.

An interpreter that ends stops its daemon threads where they next ask for it. One that is inside
native code then, a product of matrices for example, is stopped within C++, which aborts the whole
process.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("ragfuse")
EXITING = threading.Event()
"""Set when the process ends; it ends every answer at the next token."""
AT_MOST_S = 120.0
"""Longest time in seconds that the end of the process is put off."""
_SILENT_S = 2.0
"""Time in seconds after which a line in the log says what is waited for."""


class _Working:
    """The threads that compute, and how deeply their `at_work` is nested."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.depths: dict[int, int] = {}

    def wait(self, timeout_s: float) -> bool:
        """Wait until no other thread computes; return False if that takes longer than `timeout_s`
        seconds.
        """
        me = threading.get_ident()
        with self.changed:
            return self.changed.wait_for(lambda: not self.depths.keys() - {me}, timeout_s)


_WORKING = _Working()
if hasattr(os, "register_at_fork"):  # the threads of a forked child's parent are not its own
    os.register_at_fork(after_in_child=lambda: _Working.__init__(_WORKING))


@contextmanager
def at_work() -> Iterator[None]:
    """Let the end of the process wait until this thread leaves the block.

    A caller's daemon thread that enters or leaves it after that stays here, so that it does not go
    on with an answer that was cut off.

    Raises:
        RuntimeError: The process is ending already, and this is no daemon thread of a caller.
    """
    me = threading.get_ident()
    with _WORKING.changed:
        depth = _WORKING.depths.get(me, 0)
        is_late = EXITING.is_set() and not depth
        if not is_late:
            _WORKING.depths[me] = depth + 1
    if is_late:
        _stay()
        raise RuntimeError("The interpreter is shutting down: no new request is computed.")
    try:
        yield
    finally:
        with _WORKING.changed:
            _WORKING.depths[me] = depth
            if not depth:
                del _WORKING.depths[me]
                _WORKING.changed.notify_all()
        if not depth and EXITING.is_set():
            _stay()


def _stay() -> None:
    """Keep a caller's daemon thread here, outside of native code, until the process is gone."""
    thread = threading.current_thread()
    if thread.daemon and not isinstance(thread, _OwnThread):
        threading.Event().wait()


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread that the end of the process waits for, and return it.

    Args:
        name: The thread's name is `ragfuse-` followed by this.
        target: What it runs, with `args`.

    Raises:
        RuntimeError: No thread can be started, as the process is ending or has too many.
    """
    if EXITING.is_set():
        raise RuntimeError("The interpreter is shutting down: no thread is started.")
    thread = _OwnThread(target=target, args=args, name=f"ragfuse-{name}", daemon=True)
    thread.start()
    return thread


class _OwnThread(threading.Thread):
    """A thread of ragfuse's own, which ends at the end of its target."""

    def run(self) -> None:
        with at_work():
            super().run()


def _wait() -> None:
    """End all answers, and wait for the threads that compute; a second Ctrl-C ends the process at
    once.
    """
    EXITING.set()
    began_s = time.monotonic()
    try:
        if not _WORKING.wait(_SILENT_S):
            log.info("The program ends once the model's current step is over.")
            _WORKING.wait(AT_MOST_S - (time.monotonic() - began_s))
        for thread in threading.enumerate():
            if isinstance(thread, _OwnThread):
                thread.join(1)  # its work is done
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


atexit.register(_wait)
