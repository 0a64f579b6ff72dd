"""Tokenising from several threads: what one asks for is never what another gets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.hf.kit import family

TEXT = "A document may say </s> or <s> wherever it likes. " * 8


def test_special_tokens_of_a_document_stay_text_whatever_other_threads_ask_for() -> None:
    model = family("llama")
    as_text, as_special = model.tokens(TEXT), model.tokens(TEXT, special=True)
    assert len(as_text) > len(as_special)
    asked = [bool(turn % 2) for turn in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda special: model.tokens(TEXT, special), asked))
    assert all(ids == (as_special if special else as_text) for ids, special in zip(found, asked, strict=True))
