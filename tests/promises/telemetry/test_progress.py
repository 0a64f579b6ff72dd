"""Progress: a bar on a terminal, a line now and then elsewhere, nothing where the console
is quiet.
"""

import io

import pytest
from rich.console import Console

from ragfuse.telemetry.progress import LINE_EVERY_S, LineProgress


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def lines_of(console: Console, steps: int, seconds_each: float) -> None:
    clock = Clock()
    with LineProgress(console=console, get_time=clock) as bar:
        task = bar.add_task("questions", total=steps)
        for _ in range(steps):
            clock.seconds += seconds_each
            bar.advance(task)


def test_off_a_terminal_a_line_now_and_then_says_how_long_it_will_take():
    output = io.StringIO()
    lines_of(Console(file=output, width=40), 10, LINE_EVERY_S / 2)
    lines = output.getvalue().splitlines()
    assert lines[:2] == [
        "questions: 20% done, about 40 seconds left",
        "questions: 40% done, about 30 seconds left",
    ]
    assert len(lines) == 5


def test_what_was_done_before_does_not_make_the_rest_look_short():
    output, clock = io.StringIO(), Clock()
    with LineProgress(console=Console(file=output), get_time=clock) as bar:
        task = bar.add_task("steps", total=100)
        bar.update(task, completed=80)
        clock.seconds = 2 * LINE_EVERY_S
        bar.update(task, completed=81)
    assert output.getvalue() == "steps: 81% done, about 6 minutes left\n"


@pytest.mark.parametrize("how", [{"quiet": True}, {"force_terminal": True}])
def test_no_line_is_printed_where_the_console_is_quiet_or_has_a_bar(how: dict[str, bool]):
    output = io.StringIO()
    lines_of(Console(file=output, width=80, **how), 10, LINE_EVERY_S)  # type: ignore[arg-type]
    assert "% done" not in output.getvalue()
    assert ("100%" in output.getvalue()) is ("force_terminal" in how)
