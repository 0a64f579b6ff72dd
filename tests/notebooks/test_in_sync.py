"""The committed notebooks: what their sources say, executed, and fit to be read by strangers.

That they run is `make test-slow`'s part (nbmake); `make notebooks` makes them anew.
"""

from __future__ import annotations

import ast
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
NAMES = [source.stem for source in SOURCES]
PLACES = re.compile(
    r"/(home|root|tmp|work|usr|opt|Users|var|private)/|[A-Z]:\\\\|site-packages|0x[0-9a-f]{6,}"
)


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: Any) -> list[str]:
    """What a reader sees of the outputs, pictures left out."""
    found = []
    for output in (output for cell in code(notebook) for output in cell.outputs):
        shown = {
            kind: data
            for kind, data in output.get("data", {}).items()
            if not kind.startswith("image/")
        }
        found.append(json.dumps([output.get("text", ""), shown, output.get("traceback", "")]))
    return found


def test_every_source_has_its_notebook_and_no_notebook_is_without() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    assert len(NAMES) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_says_what_its_source_says(name: str) -> None:
    source, notebook = jupytext.read(FOLDER / f"{name}.py"), read(name)
    wanted, found = (
        [(cell.cell_type, cell.source) for cell in each.cells] for each in (source, notebook)
    )
    assert found == wanted


@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_notebook_imports_of_ragfuse_exists(name: str) -> None:
    imported = [
        (node.module or "", each.name)
        for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and "ragfuse" in (node.module or "")
        for each in node.names
    ]
    assert imported
    assert [
        f"{module}.{what}" for module, what in imported if not hasattr(import_module(module), what)
    ] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_was_executed_in_order_from_a_fresh_kernel(name: str) -> None:
    cells = code(read(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_pictures_and_text_and_no_errors(name: str) -> None:
    outputs = [output for cell in code(read(name)) for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any(output.output_type == "stream" for output in outputs)
    assert [
        output
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_names_no_place_of_the_machine_it_ran_on(name: str) -> None:
    notebook = read(name)
    assert [text for text in texts(notebook) if PLACES.search(text)] == []
    assert set(notebook.metadata) <= {"kernelspec", "jupytext"}
