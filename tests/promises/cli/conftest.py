"""One embedder for all tests of the command line, and commands over a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner

from ragfuse import Settings
from ragfuse.cli.library import Library
from ragfuse.cli.main import app

BOOK = "\n\n".join(
    f"Chapter {number}. In the year {1800 + number} the keeper of lighthouse {number} counted"
    f" {number * 7} ships, and wrote every name into a book. The book is kept in town {number},"
    " where it may be seen on Sundays."
    for number in range(20)
)


@pytest.fixture(scope="session", autouse=True)
def made_once() -> Iterator[None]:
    """What each command makes for itself is made once for all tests here: the parsers, and every
    embedder.
    """
    own, kept = vars(Library)["embeddings"], dict[str, Any]()

    def embeddings(library: Library) -> Any:
        name = str(library.settings.embedder)
        if name not in kept:
            kept[name] = own.func(library)
        return kept[name]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.testing, "_get_command", cache(typer.testing._get_command))
        patched.setattr(Library, "embeddings", property(embeddings))
        yield


@pytest.fixture
def environment(
    tiny_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Variables of a user of the tiny model, with a home and a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user").mkdir()
    ours = {"HOME": tmp_path / "user", "MODEL": tiny_settings.model, "DTYPE": "float32"}
    return {f"RAGFUSE_{name}": str(value) for name, value in {**ours, "MAX_TOKENS": 6}.items()}


@pytest.fixture
def run(environment: dict[str, str]) -> Callable[..., Any]:
    """Runs a command, with what is typed into it."""

    def run(*arguments: object, lines: tuple[str, ...] = (), **more: str) -> Any:
        typed = "".join(f"{line}\n" for line in lines)
        given = [*map(str, arguments)]
        return CliRunner().invoke(app, given, input=typed, env={**environment, **more})

    return run


@pytest.fixture
def told(run: Callable[..., Any]) -> Callable[..., Any]:
    """What a command says as JSON."""

    def told(*arguments: object, **more: str) -> Any:
        result = run(*arguments, "--json", "-", **more)
        assert result.exit_code == 0, result.output + result.stderr
        return json.loads(result.stdout)

    return told


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A folder with one document of twenty short chapters."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "lighthouses.txt").write_text(BOOK, encoding="utf-8")
    return folder


@pytest.fixture
def library(minilm_path: Path, tiny_settings: Settings) -> Callable[..., Library]:
    """Makes an index of the test's own home; changes are settings."""

    def make(name: str = "default", **changes: object) -> Library:
        return Library(tiny_settings.model_copy(update=changes), name)

    return make
