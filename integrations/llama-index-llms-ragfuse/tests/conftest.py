"""No test hears the retrievers of another one."""

from __future__ import annotations

import pytest
from llama_index.llms.ragfuse import events

from ragfuse import RetrievalRuns


@pytest.fixture(autouse=True)
def nothing_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with nothing retrieved yet."""
    monkeypatch.setattr(events, "QUERIES", RetrievalRuns("llama_index_test"))
