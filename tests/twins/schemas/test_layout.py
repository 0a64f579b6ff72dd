"""Where a schema puts its tokens, counted by hand over a tokenizer of characters, and what is
encoded together.
"""

from __future__ import annotations

import pytest
from hypothesis import given

from ragfuse.errors import PMLError
from ragfuse.schemas.layout import SchemaLayout, lay_out, outline
from ragfuse.schemas.pml import parse_schema
from ragfuse.types.keys import digest
from tests.kits.layouts import GAP, SCHEMAS, TURNS, Told, encode, laid, said, twin


def told(layout: SchemaLayout, path: str) -> tuple[str, tuple[int, ...]]:
    """A module's run: its text, and the positions of its tokens in the schema."""
    run = layout.modules[path]
    return said(run.tokens), tuple(run.start + position for position in run.positions)


def span(*ranges: tuple[int, int]) -> tuple[int, ...]:
    return tuple(position for lo, hi in ranges for position in range(lo, hi))


# positions


def test_the_tokenizer_s_first_ids_stand_first():
    schema = parse_schema('<schema name="s">ab<module name="m">c</module></schema>')
    layout = lay_out(schema, encode, GAP, bos=(7, 8), min_tokens=1)
    assert layout.modules[""].tokens == (7, 8, ord("a"), ord("b"))
    assert layout.modules["m"].start == 4


# messages


# what contradicts itself


@pytest.mark.parametrize(
    ("inside", "line", "found"),
    [
        ("<module name='m'/>\n\n<module name='m'/>", 3, "second module 'm'"),
        (
            "<module name='m'/>\n<user><union><module name='m'/></union></user>",
            2,
            "second module 'm'",
        ),
        ("<param name='p' len='1'/>\n<param name='p' len='2'/>", 2, "'p' with len 2"),
        ("<param name='p' len='0'/>", 1, "'p' of 0 tokens"),
        ("<param name='schema' len='1'/>", 1, "'schema' of 1 tokens"),
        ("<param name='p' len='3000000'/>\n<param name='q' len='3000000'/>", 2, "6000000 tokens"),
        ("<param name='p' len='999999999'/>", 1, "999999999 tokens"),
        ("<user>\n<system/></user>", 2, "'<system>' in another message"),
        ("<user><module name='m'>\n<system/></module></user>", 2, "'<system>' in another message"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused_with_its_line(inside, line, found):
    with pytest.raises(PMLError) as caught:
        laid(inside)
    assert caught.value.line == line
    assert found in caught.value.found


# what is encoded together


def test_a_stand_in_brings_the_stand_ins_of_its_own_unions():
    inner = '<union scaffold="d"><module name="c">1</module><module name="d">23</module></union>'
    layout = laid(
        f'<union scaffold="a"><module name="a">x{inner}y<param name="p" len="2"/></module></union>z'
    )
    assert told(layout, "")[0] == "x23y__z"
    assert layout.modules[""].members == ("", "a", "a/d")


def test_a_scaffold_that_no_module_is_called_counts_for_none_and_is_logged(caplog):
    layout = laid('a\n<union scaffold="DOC"><module name="Doc1">b</module></union>')
    assert told(layout, "")[0] == "a\n"
    assert "Line 2" in caplog.text
    assert "'DOC'" in caplog.text


def test_a_scaffold_is_one_run_of_its_modules_in_order_of_positions():
    layout = laid(
        'a<module name="m">bc</module>d<module name="n">ef</module><scaffold modules="n . m"/>'
    )
    (run,) = layout.scaffolds
    assert (said(run.tokens), run.positions, run.start) == ("abcdef", span((0, 6)), 0)
    assert run.members == ("n", "", "m")
    assert run.layout() == ""
    assert layout.runs == (*layout.modules.values(), run)


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        ("nn", "'nn', not a cached module"),
        ("m/o", "'m/o' without 'm'"),
        ("x y", "'x' and 'y' of the same union"),
        ("fresh", "'fresh', not a cached module"),
        ("void", "whose modules have no text"),
    ],
)
def test_a_scaffold_that_no_prompt_can_import_is_refused(modules, found):
    inside = """<module name="m">a<module name="o">b</module></module><module name="n">c</module>
        <module name="fresh" cache="false">d</module><module name="void"/>
        <union><module name="x">e</module><module name="y">f</module></union>"""
    with pytest.raises(PMLError) as caught:
        laid(f'{inside}\n<scaffold modules="{modules}"/>')
    assert found in caught.value.found
    assert caught.value.line == 4


def test_a_small_schema_of_many_tokens_is_refused_before_they_are_there():
    modules = "".join(f'<module name="m{i}">a</module>' for i in range(9))
    scaffolds = "\n".join(f'<scaffold modules=". m{i}"/>' for i in range(9))
    with pytest.raises(PMLError, match="4000041 tokens") as caught:
        laid(f'b<param name="p" len="1000000"/>{modules}\n{scaffolds}')
    assert caught.value.line == 3
    layout = laid(f'b<param name="p" len="1000000"/>{modules}<scaffold modules=". m1"/>')
    assert not any("tokens" in vars(run) for run in layout.runs)


def test_what_is_not_cached_or_short_has_no_run_and_parameters_do_not_count():
    layout = laid('a<module name="m" cache="false">b<module name="n">c</module></module>')
    assert set(layout.modules) == {"", "m/n"}
    short = '<module name="s">ab<param name="p" len="9"/></module><module name="l">abc</module>'
    assert set(laid(short, min_tokens=3).modules) == {"l"}


# keys


def test_a_run_s_layout_is_the_digest_of_its_gaps_alone():
    one = laid('a<module name="m">bc</module>d').modules[""]
    two = laid(
        '<module name="n">xyz</module><module name="k">a<module name="m">bc</module>d</module>'
    ).modules["k"]
    other = laid('a<module name="m">b</module>d').modules[""]
    assert one.layout() == two.layout() == digest("layout", *_bytes(0, 0, 3))
    assert one.layout() != other.layout()
    assert one.tokens == two.tokens == other.tokens


def test_where_kv_cannot_be_moved_a_run_s_layout_says_where_it_stands():
    layout = laid('ab<module name="m">cd</module><module name="n">cd</module>')
    first, at_two, at_four = (layout.modules[path] for path in ("", "m", "n"))
    assert first.layout(fixed=True) == ""
    assert at_two.layout(fixed=True) == digest("layout", *_bytes(2, 0, 1))
    assert at_two.layout(fixed=True) != at_four.layout(fixed=True)


def _bytes(*numbers: int) -> tuple[bytes]:
    return (b"".join(number.to_bytes(4, "little") for number in numbers),)


# all of it


def test_the_outline_names_every_module_after_what_contains_it():
    layout = laid(
        't<module name="m"><param name="p" len="2"/></module><union><module'
        ' name="x">y</module></union>'
    )
    rows = [tuple(row.values()) for row in outline(layout, 10)]
    assert rows == [
        (".", 0, 4, 1, {}, 10),
        ("m", 1, 3, 2, {"p": 2}, 0),
        ("x", 3, 4, 1, {}, 10),
    ]


@given(SCHEMAS)
def test_every_token_stands_where_the_slow_twin_puts_it(schema):
    layout = lay_out(schema, encode, GAP, TURNS, min_tokens=1)
    found = [
        Told(part.owner, part.start + i, token, part.param)
        for place in layout.places.values()
        for part in place.ranges
        for i, token in enumerate(part.tokens)
    ]
    order = [(each.owner, each.position) for each in found]
    assert len(set(order)) == len(order)
    assert sorted(found, key=str) == sorted(twin(schema, TURNS), key=str)
