"""The fixtures that the tests of all frameworks share."""

from __future__ import annotations

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
    "real_engine",
    "served",
    "served_embedded",
    "smollm",
    "thinking",
    "tiny_path",
    "tiny_settings",
]
