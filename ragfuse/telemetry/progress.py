"""Show progress and remaining time of long work: a bar on a terminal, printed lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ragfuse.types.sizes import duration_text

LINE_EVERY_S = 10.0
"""Minimum seconds between two printed lines."""
SPEED_OVER_S = 600.0
"""The time left is estimated from the progress of this many recent seconds."""


class LineProgress(Progress):
    """A progress bar on a terminal; elsewhere, a printed line about every `LINE_EVERY_S` seconds.

    Args:
        console: The console to write to. A quiet console shows nothing.
        get_time: Returns the time of a clock, in seconds.
    """

    def __init__(self, console: Console, get_time: Callable[[], float] = time.monotonic) -> None:
        shown = console.is_terminal
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(24),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not shown,
            # with auto_refresh, rich's track() counts in a thread that ends if no bar is shown
            auto_refresh=shown,
            get_time=get_time,
            speed_estimate_period=SPEED_OVER_S,
        )
        self._last_line_s: float | None = None if shown or console.quiet else get_time()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Count `advance` more steps of a task as done; print a progress line if due."""
        super().advance(task_id, advance)
        self._print_line(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Update a task as `rich.progress.Progress.update` does; print a progress line if due."""
        super().update(task_id, **changes)
        self._print_line(task_id)

    def _print_line(self, task_id: TaskID) -> None:
        task, now = self._tasks[task_id], self.get_time()
        if self._last_line_s is None or not task.total or now - self._last_line_s < LINE_EVERY_S:
            return
        self._last_line_s, left_s = now, task.time_remaining or 0.0
        left = f", about {duration_text(left_s)} left" if left_s >= 1 else ""
        line = f"{task.description}: {task.percentage:.0f}% done{left}"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress(console: Console) -> Progress:
    """Return a progress bar that disappears when the work is done."""
    return LineProgress(console)
