"""The texts of prompts of a given length."""

from __future__ import annotations

import pytest
from ragfuse_bench.modules.lengths import notes

from ragfuse.errors import InputError


def test_notes_have_as_many_tokens_as_asked_and_each_text_once(engine) -> None:
    found = notes(engine, 1500)
    assert sum(len(engine.tokens(text)) for text in found) == pytest.approx(1500, rel=0.02)
    assert len(set(found)) == len(found) > 1


def test_more_notes_than_there_are_is_told(engine) -> None:
    with pytest.raises(InputError, match="Wanted text of 90,000,000 tokens"):
        notes(engine, 90_000_000)
