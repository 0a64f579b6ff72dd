"""Progress: a bar on a terminal, a line now and then elsewhere, nothing where the console is quiet."""

import io
import os
import textwrap

import pytest
from rich.console import Console

from ragfuse.telemetry.progress import LINE_EVERY_S, LineProgress
from tests.tiny import ROOT


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


def test_off_a_terminal_a_line_now_and_then_says_how_long_it_will_take() -> None:
    output = io.StringIO()
    lines_of(Console(file=output, width=40), 10, LINE_EVERY_S / 2)
    lines = output.getvalue().splitlines()
    assert lines[0] == "questions: 20% done, about 40 seconds left"
    assert lines[1] == "questions: 40% done, about 30 seconds left"
    assert len(lines) == 5
    assert lines[-1] == "questions: 100% done"


@pytest.mark.parametrize("as_list", [True, False])
def test_items_that_are_tracked_are_told_off_a_terminal(as_list: bool) -> None:
    output, clock = io.StringIO(), Clock()
    with LineProgress(console=Console(file=output), get_time=clock) as bar:
        items = bar.track([1, 2, 3, 4] if as_list else iter(range(4)), total=4, description="questions")
        for _ in items:
            clock.seconds += LINE_EVERY_S
    assert output.getvalue().splitlines() == [
        "questions: 25% done, about 30 seconds left",
        "questions: 50% done, about 20 seconds left",
        "questions: 75% done, about 10 seconds left",
        "questions: 100% done",
    ]


def test_what_was_done_before_does_not_make_the_rest_look_short() -> None:
    output, clock = io.StringIO(), Clock()
    with LineProgress(console=Console(file=output), get_time=clock) as bar:
        task = bar.add_task("steps", total=100)
        bar.update(task, completed=80)
        clock.seconds = 2 * LINE_EVERY_S
        bar.update(task, completed=81)
    assert output.getvalue() == "steps: 81% done, about 6 minutes left\n"


def test_short_work_prints_nothing() -> None:
    output = io.StringIO()
    lines_of(Console(file=output), 3, 1.0)
    assert output.getvalue() == ""


def test_a_quiet_console_shows_nothing() -> None:
    output = io.StringIO()
    lines_of(Console(file=output, quiet=True), 10, LINE_EVERY_S)
    assert output.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_and_no_line() -> None:
    output = io.StringIO()
    lines_of(Console(file=output, force_terminal=True, width=80), 10, LINE_EVERY_S)
    assert "10/10" in output.getvalue()
    assert "% done" not in output.getvalue()


def test_in_a_notebook_a_bar_of_tqdm_is_shown_and_taken_away() -> None:
    """In a real kernel: what the cell shows while it runs, and no line besides."""
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    code = """
    from rich.console import Console
    from ragfuse.telemetry.progress import progress
    shown = []
    with progress(Console()) as bar:
        task = bar.add_task("encoding", total=10)
        for n in range(10):
            bar.advance(task)
            shown += [(each.n, each.total, each.desc) for each in bar._bars.values()]
    print(len(bar._bars), shown[0], shown[-1])
    """
    notebook = new_notebook(cells=[new_code_cell(textwrap.dedent(code))])
    kept = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{kept}")
        NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    printed = "".join(each.text for each in outputs if each.get("name") == "stdout")
    assert "0 (1, 10, 'encoding') (10, 10, 'encoding')" in printed
    assert "% done" not in printed
    bars = "".join(each.get("text", "") for each in outputs if each.get("name") == "stderr")
    assert "encoding" in bars + str(outputs)
