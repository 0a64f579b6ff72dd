"""What many tests share: the embedded models, prepared once in the user's cache, and an engine over a tiny one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integrations.tests.kit import tiny_path
from ragfuse import Engine, Settings
from ragfuse.models import prepare

__all__ = ["tiny_path"]


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The embedded LLM's folder; the first run on a machine prepares it."""
    return prepare("smollm2-135m", Settings().home)


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The embedded embedder's folder."""
    return prepare("minilm-l6", Settings().home)


@pytest.fixture
def tiny_settings(tiny_path: Path, tmp_path: Path) -> Settings:
    """A random 3-layer model in float32 whose tokens are bytes, over an empty store."""
    return Settings(model=str(tiny_path), dtype="float32", store=tmp_path / "store", home=tmp_path, max_tokens=12)


@pytest.fixture
def engine(tiny_settings: Settings) -> Iterator[Engine]:
    """An engine of the test's own."""
    with Engine(tiny_settings) as engine:
        yield engine
