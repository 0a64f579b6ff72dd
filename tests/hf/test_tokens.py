"""Tokenising from several threads: what one asks for is never what another gets."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

from tokenizers import AddedToken

from ragfuse.hf.model import HFModel
from tests.hf.families import FAMILIES
from tests.hf.kit import build, family, tokenizer

TEXT = "A document may say </s> or <s> wherever it likes. " * 8


def test_special_tokens_of_a_document_stay_text_whatever_other_threads_ask_for() -> None:
    model = family("llama")
    as_text, as_special = model.tokens(TEXT), model.tokens(TEXT, special=True)
    assert len(as_text) > len(as_special)
    asked = [bool(turn % 2) for turn in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda special: model.tokens(TEXT, special), asked))
    assert all(ids == (as_special if special else as_text) for ids, special in zip(found, asked, strict=True))


def test_what_the_template_writes_around_calls_stays_text_too() -> None:
    words = copy.deepcopy(tokenizer())
    marks = ["<tool_call>", "</tool_response>"]
    words.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in [*marks, "<table>", "  "]])
    words.chat_template = "{% for m in messages %}  <tool_call>{{ m.content }}</tool_response>{% endfor %}"
    model = HFModel(build(*FAMILIES["llama"][:2]), words)
    for mark in marks:
        assert len(model.tokens(f"a{mark}b")) == len(mark) + 2
        assert model.tokens(f"a{mark}b", special=True) == words(f"a{mark}b", add_special_tokens=False).input_ids
        assert len(model.tokens(mark, special=True)) == 1
    assert len(model.tokens("<table>")) == len(model.tokens("  ")) == 1
