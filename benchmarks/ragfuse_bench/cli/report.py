"""A console that keeps the tables which a benchmark prints, and the JSON that they end up in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragfuse.cli.options import require_writable, settings_of, write_json
from ragfuse.settings import Settings


class Report(Console):
    """A console for one benchmark.

    Args:
        benchmark: Its name.
        target: The target of `--json`; if that is standard output, the console writes to standard
            error.

    Raises:
        InputError: The target cannot be written.
    """

    def __init__(self, benchmark: str, target: Path | None) -> None:
        super().__init__(stderr=str(target) == "-")
        if str(target) != "-":
            require_writable(target)
        self._benchmark, self._target = benchmark, target
        self._tables: list[dict[str, Any]] = []

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as any console does."""
        self._tables += [_plain(each) for each in objects if isinstance(each, Table)]
        super().print(*objects, **options)

    def write(self, result: dict[str, Any]) -> None:
        """Print where a result was measured, and write it to the target, with the tables that were
        printed.
        """
        if "machine" in result:
            machine, malloc = (
                result["machine"],
                "tuned" if result["malloc"]["tuned"] else "as the system has it",
            )
            where = (
                f"{machine['gpu'] or machine['cpu']}; threads: {result['threads']}; allocator"
                f" {malloc}"
            )
            load = f"load {machine['load_average']:.1f} at the end; {result['date']}"
            super().print(f"{where}; {load}", highlight=False)
        write_json({"benchmark": self._benchmark, **result, "tables": self._tables}, self._target)


def begin(benchmark: str, json: Path | None, **named: Any) -> tuple[Report, Settings]:
    """Return the report of a benchmark that goes by the settings, and these, with what the command
    line named.

    Raises:
        SettingsError: A setting is invalid.
    """
    from ragfuse.models.device import resolve_auto

    return Report(benchmark, json), resolve_auto(settings_of(**named))


def _plain(table: Table) -> dict[str, Any]:
    columns = [[_text(cell) for cell in column.cells] for column in table.columns]
    return {
        "title": _text(table.title),
        "columns": [_text(column.header) for column in table.columns],
        "rows": [list(row) for row in zip(*columns, strict=True)],
    }


def _text(cell: Any) -> str:
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell or "")
