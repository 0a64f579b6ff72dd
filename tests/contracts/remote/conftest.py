"""A server over the tiny model, an engine beside it with the same settings, and clients of the
server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server's extra is not installed")
pytest.importorskip("uvicorn", reason="the server's extra is not installed")

from ragfuse import Engine, Settings
from ragfuse.remote import RemoteEngine
from ragfuse.serve.keys import Keys
from tests.kits.serve import BLUE, Served, serving


@pytest.fixture
def alone(varied_path: Path) -> dict[str, object]:
    """Settings without prefix caching, which would hide what chunks do."""
    return {
        "model": str(varied_path),
        "dtype": "float32",
        "prefix_cache": False,
        "learn": "retrieved",
        "max_tokens": 12,
    }


@pytest.fixture
def served(alone: dict[str, object], tmp_path: Path) -> Iterator[Served]:
    """A server that wants a key."""
    home = tmp_path / "served"
    settings = Settings(**{**alone, "store": home / "store", "home": home})
    with serving(settings, Keys([f"salt-of-blue:{BLUE}"])) as made:
        yield made


@pytest.fixture
def local(alone: dict[str, object], tmp_path: Path) -> Iterator[Engine]:
    """An engine of this process with the server's settings, over an empty store."""
    with Engine(Settings(**{**alone, "store": tmp_path / "store", "home": tmp_path})) as engine:
        yield engine


@pytest.fixture
def remote(served: Served) -> RemoteEngine:
    """A client of the server."""
    return RemoteEngine(served.root, BLUE, max_retries=0)
