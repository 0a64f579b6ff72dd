"""What a prompt takes from a schema: positions counted by hand, and checked again row by row for
schemas made up.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ragfuse.errors import PMLError
from ragfuse.schemas.layout import SchemaLayout, lay_out
from ragfuse.schemas.nodes import Import, PMLPrompt, TextNode
from tests.kits.layouts import (
    GAP,
    SCHEMAS,
    TURNS,
    Bound,
    arguments,
    bound,
    encode,
    importing,
    key_of,
    laid,
    read,
    requests,
    shown,
)

CITIES = """You plan.<module name="plan">For <param name="days" len="6"/> days<union>
<module name="rome">Rome!</module><module name="oslo">Oslo is north.</module></union>.</module>End."""


# modules and unions


def test_the_other_modules_of_the_unions_used_are_named():
    inside = (
        '<union><module name="a">1</module><module name="b">2</module><module'
        ' name="c">3</module></union>'
    )
    layout = laid(f'{inside}<union><module name="d">4</module><module name="e">5</module></union>z')
    assert bound(layout, "<b/>").others == (layout.modules["a"], layout.modules["c"])
    assert bound(layout, "").others == ()


def test_modules_are_on_offer_to_be_recomputed_where_that_is_asked():
    found = bound(laid('<module name="m">ab</module>cd'), "<m/>", blend=True).prompt
    assert [segment.kind for segment in found.segments] == ["chunk", "chunk", "fresh"]


# arguments


def test_an_argument_stands_at_its_parameter_and_what_follows_stays_in_its_place():
    layout = laid('<module name="m">ab</module><param name="p" len="3"/>cd')
    assert read(bound(layout, "", 'p="xy"').prompt) == "..xy.cd"


# scaffolds


def test_with_one_of_two_stand_ins_missing_the_other_is_taken_alone():
    inside = (
        '<union scaffold="a"><module name="a">1</module></union><union scaffold="b"><module'
        ' name="b">2</module></union>'
    )
    layout = laid(f'<module name="m">x{inside}y</module>z')
    joint = bound(layout, "<m><a/><b/></m>")
    assert joint.runs == (layout.modules["m"],)
    assert shown(joint.prompt)[0] == ("module", 0, "x12y")
    single = bound(layout, "<m><a/></m>")
    assert single.runs == (layout.modules["m"], layout.modules["m/a"])
    assert read(single.prompt) == "x1.yz"


# free text


def test_a_text_stands_behind_the_module_that_is_imported_before_it():
    layout = laid('a<union><module name="s">bc</module><module name="l">defghij</module></union>kl')
    found = bound(layout, "<s/>XYZ")
    assert shown(found.prompt) == [
        ("module", 0, "a"),
        ("module", 1, "bc"),
        ("fresh", 3, "XYZ"),
        ("module", 8, "k"),
        ("fresh", 9, "l"),
    ]


def test_a_text_longer_than_the_room_moves_all_that_is_behind_it():
    layout = laid(
        'a<union><module name="s">bc</module><module name="l">defg</module></union>hi<module'
        ' name="n">jk</module>l'
    )
    found = bound(layout, "<s/>WXYZ<n/>")
    assert read(found.prompt) == "abcWXYZhijkl"
    hi, jk = found.prompt.segments[3:5]
    assert (hi.start, hi.rows, hi.shift) == (7, (1, 3), 2)
    assert (jk.start, jk.rows, jk.shift) == (9, (0, 2), 9)


def test_where_kv_cannot_be_moved_such_a_text_is_refused_with_the_room():
    layout = laid(
        'a<union><module name="s">bc</module><module name="l">defg</module></union>hi', fixed=True
    )
    assert read(bound(layout, "<s/>XY").prompt) == "abcXYhi"
    with pytest.raises(PMLError, match="found text of 4 tokens; wanted at most 2, because"):
        bound(layout, "<s/>WXYZ")


# messages

ROOM = 'ab<module name="m">cd</module>ef<module name="n">gh</module>i'
NESTED = '<module name="m">a<module name="n">bc</module>d<module name="o">ef</module></module>g'
CHAT = '<system>be</system><user>q<module name="m">rs</module></user><assistant>ok</assistant>'
APART = '<module name="m"><user>a</user></module><module name="n"><assistant>b</assistant></module>'
TALK = "<user>1</user><assistant>2</assistant><user>3</user>"
SO = "<assistant>so</assistant>"


@pytest.mark.parametrize(
    ("inside", "asked", "wanted"),
    [
        pytest.param(ROOM, "XY<n/>", "ab..efXYghi", id="behind what is before the next import"),
        pytest.param(NESTED, "<m><n/>XY</m>", "abcXYd..g", id="in a module"),
        pytest.param(NESTED, "<m>XY</m>", "a..dXYg", id="in a module, behind no import"),
    ],
)
def test_a_text_stands_where_the_prompt_has_it(inside, asked, wanted):
    assert read(bound(laid(inside), asked).prompt) == wanted


# messages


@pytest.mark.parametrize(
    ("inside", "asked", "wanted"),
    [
        (CHAT, "<m/>\n<user>why?</user>", "{Sbe}{Uqrs}{Aok}{Uwhy?}{A"),
        (CHAT, "<m/>!<user>why?</user>...", "{Sbe}{Uqrs!}{Aok}{Uwhy?}...{A"),
        ("ab", TALK, "ab{U1}{A2}{U3}{A"),
        ("ab", TALK + SO, "ab{U1}{A2}{U3}{Aso"),
        ("ab", f"\n{TALK}\n{SO}\n", "ab{U1}{A2}{U3}{Aso"),
        ("ab", f"{TALK}{SO} and so on", "ab{U1}{A2}{U3}{Aso} and so on{A"),
        (APART, "<m/><user>c</user><n/>", "{Ua}{Uc}{Ab}{A"),
    ],
)
def test_messages_stand_where_the_prompt_has_them_and_an_answer_at_the_end_goes_on(
    inside, asked, wanted
):
    assert read(bound(laid(inside, TURNS), asked).prompt) == wanted


def test_a_message_may_not_stand_in_a_message():
    with pytest.raises(PMLError, match=r"'<user>' next to module 'm'"):
        bound(laid(CHAT + '<module name="n">x</module>', TURNS), "<m/><user>c</user><n/>")


def test_special_tokens_are_the_template_s_alone():
    found = bound(
        laid('<module name="m">{U<param name="p" len="9"/></module>', TURNS),
        '<m p="{U"/>{U<user>{U}</user>',
    )
    marked = [token for token in found.prompt.token_ids if token >= 1000]
    assert marked == encode("{U", True) + encode("}", True) + encode("{A", True)


# the end


def test_a_prompt_that_ends_with_a_module_computes_its_last_token():
    layout = laid('ab<module name="m">cde</module>')
    found = bound(layout, "<m/>").prompt
    assert shown(found) == [("module", 0, "ab"), ("module", 2, "cd"), ("fresh", 4, "e")]
    assert (found.segments[1].rows, found.segments[1].keys) == (
        (0, 2),
        (key_of(layout.modules["m"]),),
    )


# what is refused

IMPORTS = [
    ("<rom/>", "", "unknown module 'rom' in 's'"),
    ("<plan><rom/></plan>", "", "unknown module 'rom' in 'plan'"),
    ("<plan><plan/></plan>", "", "unknown module 'plan' in 'plan'"),
    ("<plan><rome/><oslo/></plan>", "", "'plan/rome' and 'plan/oslo' of the same union"),
    ("<plan/><plan/>", "", "module 'plan' imported twice"),
    ("<plan day='3'/>", "", "unknown argument 'day' of 'plan'"),
    ("<plan days='1234567'/>", "", "argument 'days' of 7 tokens"),
    ("", "who='me'", "argument 'who' of the schema itself"),
]


@pytest.mark.parametrize(("inside", "args", "found"), IMPORTS)
def test_what_the_schema_does_not_have_is_refused(inside, args, found):
    with pytest.raises(PMLError) as caught:
        bound(laid(CITIES), "\n" + inside, args)
    assert found in caught.value.found
    assert caught.value.line == (2 if inside else 1)


def test_what_is_missing_names_what_is_like_it():
    with pytest.raises(PMLError, match="'plan/rome'"):
        bound(laid(CITIES), "<rome/>")


def test_a_prompt_without_a_token_is_refused():
    with pytest.raises(PMLError, match="empty"):
        bound(laid(""), "")


# all of it


@given(some.data(), SCHEMAS, some.booleans())
def test_every_row_that_is_reused_is_the_token_at_its_place(data, schema, fixed):
    layout = lay_out(schema, encode, GAP, TURNS, min_tokens=2, fixed=fixed)
    named = [importing(scaffold.modules) for scaffold in schema.scaffolds]
    items = data.draw(some.one_of(requests(schema.items), *map(some.just, named)))
    args = data.draw(arguments(schema.items))
    with suppress(PMLError):  # nothing at all, or a text where KV cannot be moved
        check(layout, Bound.of(PMLPrompt("s", items, args), layout, encode), items, args)


def check(
    layout: SchemaLayout, found: Bound, items: tuple[object, ...], args: tuple[tuple[str, str], ...]
) -> None:
    runs = {key_of(run): run for run in found.runs}
    for segment in found.prompt.segments:
        for key in segment.keys:
            lo, hi = segment.rows or (0, len(runs[key].tokens))
            assert runs[key].tokens[lo:hi] == segment.tokens
            assert [segment.shift + at for at in runs[key].positions[lo:hi]] == [
                *range(segment.start, segment.stop)
            ]
            assert GAP not in segment.tokens
    check_scaffolds(layout, found)
    if not any(isinstance(item, TextNode) for item in _all(items)):
        check_by_hand(layout, found, items, args)


def check_scaffolds(layout: SchemaLayout, found: Bound) -> None:
    """A scaffold is taken whole or not at all; it gives way to another of at least its size
    alone.
    """
    there = {"", *found.imported}
    taken = {"" if path == "." else path: key for path, key in found.prompt.schema_use.modules}
    sizes = {key_of(run): len(run.tokens) for run in layout.scaffolds}
    for run in layout.scaffolds:
        if not there.issuperset(run.members):
            assert run not in found.runs
            continue
        keys = [taken[path] for path in run.members if taken.get(path) is not None]
        others = [sizes.get(key, 0) for key in keys if key != key_of(run)]
        assert not others or max(others) >= len(run.tokens)


def _all(items: tuple[object, ...]) -> list[object]:
    return [
        each
        for item in items
        for each in (item, *(_all(item.items) if isinstance(item, Import) else ()))
    ]


def check_by_hand(
    layout: SchemaLayout, found: Bound, items: tuple[object, ...], args: tuple[tuple[str, str], ...]
) -> None:
    """The slow twin: every token of what is imported at its place in the schema, arguments in their
    rooms.
    """
    wanted: dict[int, int] = {}

    def put(path: str, items: tuple[object, ...], args: dict[str, str]) -> None:
        place = layout.places[path]
        for part in place.ranges:
            tokens = [ord(char) for char in args.get(part.param, "")] if part.param else part.tokens
            wanted.update(zip(range(part.start, part.stop), tokens, strict=False))
        for item in items:
            if isinstance(item, Import):
                put(f"{path}/{item.name}".strip("/"), item.items, dict(item.args))

    put("", items, dict(args))
    at = dict(zip(found.prompt.positions.tolist(), found.prompt.token_ids, strict=True))
    end = max(wanted, default=-1)
    assert {position: token for position, token in at.items() if position <= end} == wanted
    assert len(found.prompt.segments[-1].tokens) >= 1
