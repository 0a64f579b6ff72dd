"""The texts of prompts of a given length."""

from __future__ import annotations

import pytest
from ragfuse_bench.modules.lengths import notes


def test_notes_have_as_many_tokens_as_asked_and_each_text_once(engine) -> None:
    found = notes(engine, 1500)
    assert sum(len(engine.tokens(text)) for text in found) == pytest.approx(1500, rel=0.02)
    assert len(set(found)) == len(found) > 1
