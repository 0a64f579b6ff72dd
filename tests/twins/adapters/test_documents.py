"""Documents are found wherever a framework nests them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from ragfuse.adapters import DocumentReader, source_of


@dataclass
class Letter:
    text: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class Envelope:
    content: Any


def opened(value: Any) -> Any:
    return value.content if isinstance(value, Envelope) else value


read = DocumentReader(
    Letter, lambda each: (each.text.strip(), source_of(each.meta, each.text), ""), opened
)
A, B = Letter(" A letter. ", {"source": "a.txt"}), Letter("Another.", {"file_name": "b.txt"})
FOUND = [("A letter.", "a.txt", ""), ("Another.", "b.txt", "")]


@pytest.mark.parametrize(
    "value",
    [
        [A, B],
        (A, [B]),
        ("text", [A, B]),
        {"found": [A], "more": {"deep": [[B]]}},
        [Envelope([A]), Envelope({"b": B})],
        [A, Letter(" \n"), B],
    ],
)
def test_documents_are_found_in_any_nesting(value):
    assert read(value) == FOUND
    assert read(A, [B]) == FOUND


@pytest.mark.parametrize("value", [None, "A letter.", 3, [1.0, A], [[[[[[A]]]]]], Envelope("x")])
def test_what_holds_none_is_passed_over(value):
    assert read(value) == []


def test_a_source_is_for_people():
    assert source_of({"title": "T", "url": "http://x"}, "", "7") == "http://x"
    assert source_of({}, "A letter.", None, "7") == "7"
    assert source_of({}, "A letter.").startswith("document ")
    assert source_of({}, "A letter.") != source_of({}, "Another.")
