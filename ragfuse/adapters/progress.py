"""Progress of encoding ahead: a bar on a terminal, or calls of a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from ragfuse.telemetry.progress import LineProgress
from ragfuse.types.answer import Ingested

Progress = bool | Callable[[Ingested], None] | None
"""True: a bar on stderr if that is a terminal. False or None: nothing. A callable: called after
every document.
"""


@contextmanager
def shown(
    progress: Progress, total: int | None, what: str = "Encoding chunks"
) -> Iterator[Callable[[Ingested], None] | None]:
    """Yield the function to call after every document, or None; a bar is removed at exit."""
    if not progress or callable(progress):
        yield progress or None
        return
    with LineProgress(Console(file=sys.stderr, quiet=not sys.stderr.isatty())) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done.chunks)
