"""No test hears the retrievers of another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_ragfuse.callbacks import LISTENER


@pytest.fixture(autouse=True)
def nothing_heard() -> Iterator[None]:
    """Each test in a context in which nothing was retrieved yet."""
    with LISTENER.runs.apart():
        yield
