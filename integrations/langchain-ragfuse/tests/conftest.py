"""No test hears the retrievers of another one."""

from __future__ import annotations

import pytest
from langchain_ragfuse.callbacks import LISTENER

from ragfuse import RetrievalRuns


@pytest.fixture(autouse=True)
def nothing_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with nothing retrieved yet."""
    monkeypatch.setattr(LISTENER, "runs", RetrievalRuns("langchain_test"))
