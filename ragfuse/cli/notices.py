"""What is said beside an answer, on standard error, so that standard output has the answer alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from ragfuse.cli.show import names_of

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.types.answer import Trace


def tell_sources(sources: Iterable[str]) -> None:
    """Say which documents the passages of a prompt were retrieved from."""
    names = names_of(sources)
    if names:
        _say(f"From {', '.join(names)}.", "dim")


def warn_of_unfinished(library: Library) -> None:
    """Say which ingests into an index have not ended, as it answers from what it has."""
    for warning in library.warnings():
        _say(warning, "yellow")


def tell_late(trace: Trace) -> None:
    """Say when the first token came, where that was after the deadline."""
    if trace.is_late:
        _say(f"Wanted the first token within {trace.deadline_s:g} s, got it after {trace.ttft_s:.3f} s.", "yellow")


def _say(text: str, style: str) -> None:
    Console(stderr=True).print(text, style=style, highlight=False, markup=False, soft_wrap=True)
