"""One server for tests that only ask, and settings for those that need one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server's extra is not installed")
pytest.importorskip("uvicorn", reason="the server's extra is not installed")

from tests.serve.kit import Served, serving, settings_of


@pytest.fixture(scope="session")
def served(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over the tiny model, on loopback, without keys."""
    home = tmp_path_factory.mktemp("served")
    settings = settings_of(varied_path, home, max_tokens=12)
    with serving(settings) as made:
        yield made
