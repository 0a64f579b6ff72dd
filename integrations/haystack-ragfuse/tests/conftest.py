"""No test hears the retrievers of another one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = (
    "False"  # before Haystack is imported, which reads it then
)

from haystack import tracing
from haystack_integrations.components.generators.ragfuse.retrieved import RUNS


@pytest.fixture(autouse=True)
def nothing_heard() -> Iterator[None]:
    """Each test in a context in which nothing was retrieved yet, and without a tracer that another
    one left.
    """
    tracing.disable_tracing()
    with RUNS.apart():
        yield
    tracing.disable_tracing()
