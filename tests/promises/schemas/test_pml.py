"""PML text and back: every tag, every refusal with its place, and nothing that a hostile text could
do.
"""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ragfuse.errors import PMLError
from ragfuse.schemas.nodes import (
    Import,
    Module,
    PMLPrompt,
    Role,
    Schema,
    TextNode,
)
from ragfuse.schemas.pml import (
    MAX_DEPTH,
    is_name,
    parse,
    parse_prompt,
    parse_schema,
    read,
    to_pml,
)
from tests.kits.layouts import SCHEMAS, requests


def schema(inside: str) -> Schema:
    return parse_schema(f'<schema name="s">{inside}</schema>')


# what is read


def test_a_schema_is_its_items_in_order_with_all_white_space():
    found = schema(' a\n<module name="m">\n b </module>\t<system> c </system>')
    assert found.items == (
        TextNode(" a\n"),
        Module("m", (TextNode("\n b "),)),
        TextNode("\t"),
        Role("system", (TextNode(" c "),)),
    )


def test_entities_character_references_and_cdata_are_text_and_comments_are_none():
    found = schema("a<!-- <module> -->b&lt;&amp;&gt;&quot;&apos;&#233;&#xE9;<![CDATA[<a & b>]]>")
    assert found.items == (TextNode("ab<&>\"'éé<a & b>"),)


def test_a_prompt_imports_by_element_names_with_arguments_as_attributes():
    found = parse_prompt(
        '<prompt schema="s" who="me"><plan days="a &lt; b"><oslo/>'
        " more</plan><user>Why?\n</user></prompt>"
    )
    plan = Import("plan", (("days", "a < b"),), (Import("oslo"), TextNode(" more")))
    assert found == PMLPrompt("s", (plan, Role("user", (TextNode("Why?\n"),))), (("who", "me"),))


def test_a_node_says_where_it_stands():
    found = parse_schema('<!-- -->\n<schema name="é">\n é<module name="m"/></schema>', "f.xml")
    assert (found.at.file, found.at.line, found.at.column) == ("f.xml", 2, 1)
    assert [(item.at.line, item.at.column) for item in found.items] == [(2, 18), (3, 3)]


def test_a_declaration_of_another_encoding_does_not_count_for_text():
    assert parse_schema(
        '<?xml version="1.0" encoding="latin-1"?><schema name="s">é</schema>'
    ).items == (TextNode("é"),)


def test_a_file_is_read_and_named_in_errors(tmp_path):
    path = tmp_path / "a.xml"
    path.write_text('<schema name="s">é</schema>', encoding="utf-8")
    assert read(path) == schema("é")
    path.write_bytes(b"<schema name='s'>\n ab\xff</schema>")
    for broken in (path, tmp_path / "none.xml"):
        with pytest.raises(PMLError, match=broken.name):
            read(broken)


# what is refused, and where

REFUSED = [
    ("<x/>", 1, 1, "'<x>'"),
    ("<schema name='s'>\n <modul/></schema>", 2, 2, "'<modul>' in '<schema>'"),
    ("<schema name='s' nam='t'/>", 1, 1, "attribute 'nam'"),
    ("<schema name='s'><module/></schema>", 1, 18, "'<module>' without 'name'"),
    ("<schema name='s'><module name='a b'/></schema>", 1, 18, "name 'a b'"),
    ("<schema name='s'><module name='user'/></schema>", 1, 18, "name 'user'"),
    ("<schema name='s'><module name='m' cache='no'/></schema>", 1, 18, "cache='no'"),
    ("<schema name='s'><param name='p'/></schema>", 1, 18, "len='' of parameter 'p'"),
    ("<schema name='s'><param name='p' len='1'>x</param></schema>", 1, 42, "text in '<param>'"),
    ("<prompt/>", 1, 1, "'<prompt>' without 'schema'"),
    ("<prompt schema='s'><module/></prompt>", 1, 20, "'<module>' in '<prompt>'"),
    ("<prompt schema='s'><user><m/></user></prompt>", 1, 20, "'<user>' with attributes or tags"),
    ("<prompt schema='s'><m><user/></m></prompt>", 1, 23, "'<user>' in '<m>'"),
    (
        "<schema name='s'>\n<module name='m'>\n</schema>",
        3,
        3,
        "mismatched tag in <module> of line 2",
    ),
    ("<schema name='s'>\n a < b </schema>", 2, 5, "not well-formed"),
    ("<!DOCTYPE schema><schema name='s'/>", 1, 17, "a DTD"),
]


@pytest.mark.parametrize(("text", "line", "column", "found"), REFUSED)
def test_what_is_no_pml_is_refused_with_its_place(text, line, column, found):
    with pytest.raises(PMLError) as caught:
        parse(text, "a.xml")
    assert str(caught.value).startswith(f"a.xml:{line}:{column}: found {caught.value.found}")
    assert found in caught.value.found


def test_a_schema_is_no_prompt_and_a_prompt_no_schema():
    with pytest.raises(PMLError, match="found <schema>; wanted <prompt>"):
        parse_prompt("<schema name='s'/>")
    with pytest.raises(PMLError, match="found <prompt>; wanted <schema>"):
        parse_schema("<prompt schema='s'/>")


def test_names_are_what_xml_allows():
    for name in ("a", "_", "unit.py", "user-1", "été", "N"):
        assert is_name(name)
        assert parse_prompt(f"<prompt schema='s'><{name}/></prompt>").items == (Import(name),)
    odd = ["", "1a", "a b", "a/b", "a:b", "-a", "é b", "²", "a\ud800", "é><b"]
    assert not any(map(is_name, odd))


# what a hostile text could do

BOMB = "<!DOCTYPE a [<!ENTITY a 'aaaaaaaaaa'>" + "".join(
    f"<!ENTITY {b} '&{a};&{a};&{a};&{a};&{a};&{a};&{a};&{a};'>"
    for a, b in zip(string.ascii_lowercase, string.ascii_lowercase[1:], strict=False)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB + "]><schema name='s'>&z;</schema>",
        "<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><schema name='s'>&x;</schema>",
    ],
)
def test_entities_and_whatever_would_be_fetched_are_refused(text):
    with pytest.raises(PMLError, match="found a DTD"):
        parse(text)


def test_depth_is_limited():
    nested = "".join(f"<module name='m{i}'>" for i in range(MAX_DEPTH - 1))
    assert schema(nested + "</module>" * (MAX_DEPTH - 1)).items
    with pytest.raises(PMLError, match=f"at most {MAX_DEPTH} levels"):
        parse("<schema name='s'>" + "<module name='m'>" * 100_000)


def test_what_xml_cannot_hold_is_replaced_as_in_any_text():
    assert schema("\ud800 \0") == schema("\ufffd \ufffd")
    for char in "\1\0":
        assert parse(to_pml(Schema("s", (TextNode(f"a{char}"),)))) == schema("a\ufffd")


@given(SCHEMAS)
def test_a_schema_comes_back_from_its_text(given_schema):
    assert parse(to_pml(given_schema), "f") == given_schema


@given(some.data(), SCHEMAS)
def test_a_prompt_comes_back_from_its_text(data, given_schema):
    items = data.draw(requests(given_schema.items))
    request = PMLPrompt("s", items, (("who", "a \"b\" & 'c'\n"),))
    assert parse(to_pml(request)) == request
