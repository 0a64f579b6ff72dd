"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table, its first column to the left."""
    yield "| " + " | ".join(columns) + " |"
    yield "| --- |" + " ---: |" * (len(columns) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def number(value: float | None, form: str = ".3f") -> str:
    """A number in this form; nothing where there is none."""
    return "" if value is None else format(value, form)
