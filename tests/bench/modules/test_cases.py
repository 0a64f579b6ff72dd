"""The prompts that modules are measured on: the uses that come along, and data sets' documents as
modules.
"""

from __future__ import annotations

import re

import pytest
from ragfuse_bench.modules.cases import of_documents, uses
from ragfuse_bench.options import USES

from ragfuse.calibration.case import PROMPT_TEXTS, Case
from ragfuse.schemas.layout import lay_out
from ragfuse.schemas.pml import parse_schema, to_pml
from tests.kits.layouts import Bound


def encode(text: str, special: bool) -> list[int]:
    """A word is a token: its own number, the same each time."""
    return [int.from_bytes(word.encode()[:3], "big") for word in re.findall(r"\s*\w+|\s*\W", text)]


def bound(case, encode=encode):
    layout = lay_out(case.schema, encode, placeholder=0)
    return layout, Bound.of(case.request, layout, encode)


@pytest.mark.parametrize("name", USES)
def test_a_use_that_comes_along_binds_and_is_nearly_all_cached(name: str) -> None:
    (case,) = uses([name])
    _, taken = bound(case)
    prompt = taken.prompt
    fresh = sum(len(segment.tokens) for segment in prompt.segments if segment.kind == "fresh")
    assert fresh < 0.12 * len(prompt)
    assert len(taken.imported) >= 4


def test_a_document_s_prompt_reads_as_the_benchmarks_word_it() -> None:
    chunks = ("The first\x00 passage is <here>.", "The second & last one.")
    case = of_documents(Case("made", "1", "Who? {question}", ("nobody",), chunks))
    _, taken = bound(case, lambda text, special: [ord(letter) for letter in text])
    before, after = PROMPT_TEXTS["answer"]
    said = (
        before
        + "\n\n".join(chunks).replace("\x00", "")
        + after.replace("{question}", "Who? {question}")
    )
    assert "".join(map(chr, taken.prompt.token_ids)) == said + "\n"
    assert taken.imported == ("document-1", "document-2")
    assert parse_schema(to_pml(case.schema)) == case.schema
