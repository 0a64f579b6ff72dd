"""The list of which document has which texts."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from llama_index.llms.ragfuse.ledger import FILE, Ledger


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_text_that_no_document_uses_any_more_is_told_and_counted(tmp_path: Path, on_disk: bool) -> None:
    ledger = Ledger(tmp_path if on_disk else None)
    ledger.note("model", "docs", [("a", "1", "text")])
    ledger.note("other", "docs", [("a", "1", "another text")])
    given: list[str] = []

    def forget(texts: list[str]) -> int:
        given.extend(texts)
        return 0

    ledger.collect("model", "nothing", lambda *_: False, forget)
    ledger.collect("other", "docs", lambda *_: False, forget)
    assert given == ["another text"]
    assert ledger.collected("other", "docs") == 1
    if on_disk:
        assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
