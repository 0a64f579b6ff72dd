"""No test hears the retrievers of another one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = (
    "False"  # before Haystack is imported, which reads it then
)

from haystack import tracing
from haystack_integrations.components.generators.ragfuse import retrieved

from ragfuse import RetrievalRuns


@pytest.fixture(autouse=True)
def nothing_heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins with nothing retrieved yet, and without a tracer that another one left."""
    tracing.disable_tracing()
    monkeypatch.setattr(retrieved, "RUNS", RetrievalRuns("haystack_test"))
    yield
    tracing.disable_tracing()
