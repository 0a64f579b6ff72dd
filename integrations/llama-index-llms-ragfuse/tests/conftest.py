"""No test hears the retrievers of another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.llms.ragfuse.events import QUERIES


@pytest.fixture(autouse=True)
def nothing_heard() -> Iterator[None]:
    """Each test in a context in which nothing was retrieved yet."""
    with QUERIES.apart():
        yield
