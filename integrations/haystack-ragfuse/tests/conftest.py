"""The fixtures that all siblings' tests share, and one that keeps tests from hearing each other's
retrievers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = (
    "False"  # before Haystack is imported, which reads it then
)

from haystack import tracing
from haystack_integrations.components.generators.ragfuse.retrieved import RUNS

from integrations.tests.kit import engine, minilm, real_engine, smollm, tiny_path, tiny_settings
from integrations.tests.served import served, served_embedded
from integrations.tests.thoughts import thinking

__all__ = [
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
    """Each test in a context in which nothing was retrieved yet, and without a tracer that another
    one left.
    """
    tracing.disable_tracing()
    with RUNS.apart():
        yield
    tracing.disable_tracing()
