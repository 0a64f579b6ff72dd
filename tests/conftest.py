"""What many tests share: the embedded models, prepared once in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragfuse.models import prepare
from ragfuse.settings import Settings


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The embedded LLM's folder; the first run on a machine prepares it."""
    return prepare("smollm2-135m", Settings().home)


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The embedded embedder's folder."""
    return prepare("minilm-l6", Settings().home)
