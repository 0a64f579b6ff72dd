"""`python -m notebooks [NAME ...]`: makes the notebooks from their .py sources and keeps their outputs.

Each is executed whole in a kernel of its own; a cell that fails stops everything, and its notebook stays as it was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from rich.console import Console

FOLDER = Path(__file__).parent
TIMEOUT_S = 900
QUIET = ["--log-level=ERROR"]
"""Without it each kernel warns that it talks over a local port."""
KEPT = ("kernelspec", "jupytext")
"""Metadata of a notebook that is kept; what the kernel adds changes with every machine."""


def main(names: list[str]) -> None:
    """Make all notebooks, or those that are named."""
    console, sources = Console(), {each.stem: each for each in sorted(FOLDER.glob("[0-9]*.py"))}
    if unknown := [name for name in names if name not in sources]:
        sys.exit(f"No notebook is called {', '.join(unknown)}. There are: {', '.join(sources)}.")
    for name in names or sources:
        try:
            with console.status(f"{name} ..."):
                make(sources[name])
        except CellExecutionError as error:
            sys.exit(f"{error}\n{name}: this cell failed. The notebook is as it was.")
        console.print(f"Written: notebooks/{name}.ipynb", highlight=False)


def make(source: Path) -> None:
    """The notebook beside a source, executed."""
    notebook = jupytext.read(source)
    where = {"metadata": {"path": FOLDER}}
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=QUIET,
        coalesce_streams=True,
        resources=where,
    )
    client.execute()
    keep(notebook, source.with_suffix(".ipynb"))


def keep(notebook: Any, path: Path) -> None:
    """Write an executed notebook without what is about where it ran: metadata, times, what libraries warn of."""
    notebook.metadata = {
        name: notebook.metadata[name] for name in KEPT if name in notebook.metadata
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
