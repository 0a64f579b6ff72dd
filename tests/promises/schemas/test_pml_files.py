"""Whole files of PML, with every spelling that published ones have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ragfuse.errors import PMLError
from ragfuse.schemas.layout import lay_out
from ragfuse.schemas.pml import parse, read, to_pml
from tests.kits.layouts import GAP, TURNS, Bound, encode
from tests.kits.layouts import read as as_text

HERE = Path(__file__).parent / "pml"


@pytest.mark.parametrize(
    "name", ["trip", "every_tag", "traits", "trip_prompt", "every_tag_prompt", "traits_prompt"]
)
def test_a_file_comes_back_from_what_it_says(name):
    found = read(HERE / f"{name}.xml")
    assert parse(to_pml(found)) == found


def test_every_tag_does_what_it_says():
    layout = lay_out(read(HERE / "every_tag.xml"), encode, GAP, TURNS)
    found = Bound.of(read(HERE / "every_tag_prompt.xml"), layout, encode)
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
    layout = lay_out(read(HERE / "traits.xml"), encode, GAP, TURNS)
    text = as_text(Bound.of(read(HERE / "traits_prompt.xml"), layout, encode).prompt)
    assert all(each in text for each in ("Outgoing, and glad of company.", "Hunches."))
    assert "Outgoing or not." not in text


@pytest.mark.parametrize(
    ("name", "line", "column"), [("bad_less", 3, 19), ("bad_ampersand", 3, 25)]
)
def test_a_file_that_is_no_xml_is_refused_with_its_line(name, line, column):
    with pytest.raises(PMLError, match=r"&lt; for < and &amp; for &") as caught:
        read(HERE / f"{name}.xml")
    assert str(caught.value).startswith(f"{HERE / name}.xml:{line}:{column}")
