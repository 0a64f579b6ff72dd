"""How much work a call does, counted and not timed: lines of ragfuse that run, and bytes that are hashed on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ragfuse.text import chunks, fingerprints

HOME = str(Path(chunks.__file__).parents[1])
MOST_GROWTH = 8.5
"""Of the work, where the input is eight times as long and the work is linear."""


def lines(call: Callable[[], object]) -> int:
    """Lines of ragfuse's own files that run while it is called, each as often as it does."""
    n = 0

    def within(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal n
        n += event == "line"
        return within

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        return within if frame.f_code.co_filename.startswith(HOME) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return n


class Hashed:
    """Bytes that were read for fingerprints and keyed hashes."""

    def __init__(self) -> None:
        self.nbytes = 0

    @contextmanager
    def counted(self, monkeypatch):
        """Count from now on."""
        read, keyed = fingerprints._bytes, chunks.blake3

        def counted_read(text: str) -> bytes:
            data = read(text)
            self.nbytes += len(data)
            return data

        def counted_keyed(data: bytes, **options: Any) -> Any:
            self.nbytes += len(data)
            return keyed(data, **options)

        with monkeypatch.context() as patch:
            patch.setattr(fingerprints, "_bytes", counted_read)
            patch.setattr(chunks, "blake3", counted_keyed)
            yield self
