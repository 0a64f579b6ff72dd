"""What the programs of the comparison speak: one JSON object a line, by standard input and output.

Imports the standard library alone, as every engine's own Python runs it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TextIO


class Engine(Protocol):
    """An engine that a program of the comparison drives."""

    version: str
    """What runs, by its own number."""

    def hold(self, chunks: Sequence[str]) -> dict[str, Any]:
        """Make ready what can be of chunks that will recur; the figures of that."""
        ...

    def answer(self, ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield the greedy answer's token ids, each as soon as it is known."""
        ...

    def rest(self) -> dict[str, Any]:
        """Finish what an answer leaves behind, so that nothing computes until the next; what is on
        disk then.
        """
        ...


def private_stdout() -> TextIO:
    """The standard output for answers alone: whatever else this process prints goes to standard
    error.
    """
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return own


def serve(engine: Engine, out: TextIO, questions: TextIO | None = None) -> None:
    """Answer the lines of standard input until it ends."""

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    gc.collect()
    gc.freeze()
    say(ready=engine.version)
    for line in questions or sys.stdin:
        asked = json.loads(line)
        if "hold" in asked:
            say(done=engine.hold(asked["hold"]))
            continue
        for token in engine.answer(asked["ids"], asked["max_tokens"]):
            say(token=token)
        found = engine.rest()
        gc.collect()
        say(done=found)
