"""The fixtures that both siblings' tests share, and one that keeps tests from hearing each other's
retrievers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.llms.ragfuse.events import QUERIES

from integrations.tests.kit import (
    asks,
    engine,
    minilm,
    real_engine,
    smollm,
    tiny_path,
    tiny_settings,
)
from integrations.tests.served import served, served_embedded
from integrations.tests.thoughts import thinking

__all__ = [
    "asks",
    "engine",
    "minilm",
    "nothing_heard",
    "real_engine",
    "served",
    "served_embedded",
    "smollm",
    "thinking",
    "tiny_path",
    "tiny_settings",
]


@pytest.fixture(autouse=True)
def nothing_heard() -> Iterator[None]:
    """Each test in a context in which nothing was retrieved yet."""
    with QUERIES.apart():
        yield
