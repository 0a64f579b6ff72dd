"""Whole files of PML: our own with every spelling that published ones have, and those themselves
where at hand.

PML_FILES names a folder with Prompt Cache's schemas and prompts and a MANIFEST.jsonl that says
which are no XML; without it, `shared/data/pml` beside the checkout is looked for.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ragfuse.errors import PMLError
from ragfuse.schemas.layout import Encode, ModulePosition, SchemaLayout, lay_out
from ragfuse.schemas.nodes import Import, PMLPrompt, Role, Schema, TextNode
from ragfuse.schemas.pml import parse, read
from ragfuse.schemas.pml_writer import to_pml
from tests.text.layouts import GAP, TURNS, Bound, encode
from tests.text.layouts import read as as_text

HERE = Path(__file__).parent / "pml"
THERE = Path(
    os.environ.get("PML_FILES", Path(__file__).resolve().parents[3] / "shared" / "data" / "pml")
)
published = pytest.mark.skipif(
    not (THERE / "MANIFEST.jsonl").exists(), reason="set PML_FILES to published files"
)


def layout_of(schema: Schema | PMLPrompt, encode: Encode = encode) -> SchemaLayout:
    assert isinstance(schema, Schema)
    return lay_out(schema, encode, GAP, TURNS)


def bound(request: Schema | PMLPrompt, layout: SchemaLayout, encode: Encode = encode) -> Bound:
    assert isinstance(request, PMLPrompt)
    return Bound.of(request, layout, encode)


def everything(place: ModulePosition) -> tuple[Import, ...]:
    """All that one prompt can import of a module: of a union the last."""
    last = {child.union or child.path: child for child in place.places}
    return tuple(Import(child.name, (), everything(child)) for child in last.values())


# our own


@pytest.mark.parametrize(
    "name", ["trip", "every_tag", "traits", "trip_prompt", "every_tag_prompt", "traits_prompt"]
)
def test_a_file_comes_back_from_what_it_says(name):
    found = read(HERE / f"{name}.xml")
    assert parse(to_pml(found)) == found


def test_every_tag_does_what_it_says():
    layout = layout_of(read(HERE / "every_tag.xml"))
    found = bound(read(HERE / "every_tag_prompt.xml"), layout)
    assert found.imported == (
        "preface",
        "preface/nested",
        "preface/rule3",
        "preface/user2",
        "task",
        "task/steer",
    )
    assert [run.members for run in layout.scaffolds] == [("", "task", "task/steer")]
    assert layout.scaffolds[0] in found.runs
    assert {run.members for run in found.others} == {("preface/rule1",), ("task/wait.py",)}
    assert "preface/rule2" not in layout.modules
    assert (
        re.sub(r"[.\s]+", " ", as_text(found.prompt))
        == " Some words and room for more: test Nested{S The third rule, about a word A second"
        " person } Steer it fast {UWhat comes next?}{AIt moves }{UHow fast?}{A"
    )


def test_modules_of_unions_stand_in_until_others_are_imported():
    found = bound(read(HERE / "traits_prompt.xml"), layout_of(read(HERE / "traits.xml")))
    text = as_text(found.prompt)
    assert all(each in text for each in ("Outgoing, and glad of company.", "Hunches."))
    assert "Outgoing or not." not in text


@pytest.mark.parametrize(
    ("name", "line", "column"), [("bad_less", 3, 19), ("bad_ampersand", 3, 25)]
)
def test_a_file_that_is_no_xml_is_refused_with_its_line(name, line, column):
    with pytest.raises(PMLError, match=r"&lt; for < and &amp; for &") as caught:
        read(HERE / f"{name}.xml")
    assert str(caught.value).startswith(f"{HERE / name}.xml:{line}:{column}")


# published ones


def manifest() -> list[dict[str, Any]]:
    """What is known of every file; nothing where they are not at hand."""
    path = THERE / "MANIFEST.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@published
@pytest.mark.parametrize("known", manifest(), ids=lambda known: known["file"])
def test_a_published_file_parses_lays_out_and_binds_or_is_refused_with_its_line(
    known,
):
    path = THERE / known["file"]
    if not known["xml_wellformed"]:
        where = re.search(r"line (\d+), column (\d+)", known["xml_error"])
        assert where is not None
        with pytest.raises(PMLError) as caught:
            read(path)
        assert (caught.value.line, caught.value.column) == (int(where[1]), int(where[2]) + 1)
        return
    found = read(path)
    assert parse(to_pml(found)) == found
    if isinstance(found, Schema):
        layout = layout_of(found)
        request = PMLPrompt(
            found.name, (*everything(layout.root), Role("user", (TextNode("Why?"),)))
        )
        all_bound = bound(request, layout)
        assert as_text(all_bound.prompt).endswith("{UWhy?}{A")
        assert sum(len(run.tokens) for run in layout.modules.values()) > 0
