"""One server for tests that only ask, and a maker of those that need settings of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server's extra is not installed")
pytest.importorskip("uvicorn", reason="the server's extra is not installed")

from ragfuse.serve.keys import Keys
from tests.kits.serve import Client, Served, client_of, serving, settings_of


@pytest.fixture(scope="session")
def served(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over the tiny model, on loopback, without keys."""
    home = tmp_path_factory.mktemp("served")
    with serving(settings_of(varied_path, home, max_tokens=12)) as made:
        yield made


@pytest.fixture(scope="module")
def make_server(
    varied_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Served]]:
    """Start servers that end with the module's tests."""
    with ExitStack() as servers:

        def make(keys: tuple[str, ...] = (), model: Path = varied_path, **settings: Any) -> Served:
            made = settings_of(model, tmp_path_factory.mktemp("server"), **settings)
            return servers.enter_context(serving(made, Keys(keys)))

        yield make


@pytest.fixture
def client(served: Served) -> Client:
    """OpenAI's own client of the module's server."""
    return client_of(served)
