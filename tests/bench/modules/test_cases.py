"""The prompts that modules are measured on: the uses that come along, and data sets' documents as
modules.
"""

from __future__ import annotations

import re

import pytest
from ragfuse_bench.modules.cases import documents, long_schema, of_documents, over_all, uses
from ragfuse_bench.options import USES
from ragfuse_bench.quality.cases import Packing

from ragfuse.calibration.case import Case
from ragfuse.calibration.prompts import PROMPT_TEXTS
from ragfuse.errors import SettingsError
from ragfuse.schemas.layout import lay_out
from ragfuse.schemas.nodes import Module, Role, Union, inner
from ragfuse.schemas.pml import parse_schema
from ragfuse.schemas.pml_writer import to_pml
from tests.text.layouts import Bound


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


def test_the_person_has_six_categories_of_five_traits() -> None:
    (case,) = uses(["cooking"])
    (message,) = (
        item for item in case.schema.items if isinstance(item, Role) and item.role == "user"
    )
    unions = [item for item in message.items if isinstance(item, Union)]
    assert [len(union.modules) for union in unions] == [5] * 6
    _, taken = bound(case)
    assert len(taken.others) == 6 * 4


def test_the_trip_has_parameters_and_a_union_in_a_union() -> None:
    (case,) = uses(["trip"])
    layout, taken = bound(case)
    towns = [layout.places[f"plan/abroad/{town}"] for town in ("lisbon", "oslo", "kyoto")]
    assert len({town.start for town in towns}) == 1
    assert "plan/abroad/lisbon" in taken.imported


def test_a_use_that_there_is_not_is_named() -> None:
    with pytest.raises(
        SettingsError, match=r"'cookery' of modules here\. It is one of: code, cooking, trip"
    ):
        uses(["cookery"])


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


def test_questions_over_documents_are_as_many_as_asked_of_each_set() -> None:
    found = list(documents(["held-out", "demo"], 3, Packing(lambda text: len(text.split()))))
    assert [case.dataset for case in found] == ["held-out"] * 3 + ["demo"] * 3
    assert all(case.answers for case in found)
    modules = [
        [item for item in inner(case.schema.items) if isinstance(item, Module)] for case in found
    ]
    assert {len(each) for each in modules} == {6}


def test_a_prompt_may_take_the_first_of_the_notes_alone() -> None:
    schema = long_schema("notes", ["one text", "two texts", "three texts"])
    request = over_all(schema, 2, "Which?")
    assert [item.name for item in request.items[:-1]] == ["notes-1", "notes-2"]
