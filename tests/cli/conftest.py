"""One embedder for all tests of the command line, and a tiny model to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from ragfuse import Settings
from ragfuse.cli.library import Library

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
