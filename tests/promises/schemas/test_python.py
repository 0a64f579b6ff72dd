"""Prompt functions: what they are compiled to, what their calls import, and what is refused with
its line.
"""

# ruff: noqa: B018, B021
from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

from ragfuse.errors import PMLError
from ragfuse.schemas.bind import bind
from ragfuse.schemas.frontends.python import MaxTokens, assistant, program, schema_of, system, user
from ragfuse.schemas.layout import lay_out
from ragfuse.schemas.nodes import Import, Module, Param, PMLPrompt, Role, TextNode, Union
from ragfuse.schemas.pml import parse, to_pml
from tests.kits.layouts import GAP, TURNS, encode, key_of, read

RULE = "Be brief. "


@program
def hotel(stars: Annotated[int, MaxTokens(2)]) -> None:
    """Which hotel; this is not part of it."""
    f"A hotel of {stars} stars. "


@program
def trip(
    days: Annotated[str, MaxTokens(6)], abroad: bool, town: str = "oslo", *, slow: bool = False
) -> None:
    """What a trip is."""
    with system:
        RULE
    with user:
        f"I have {days}. "
        if abroad:
            "I cross the border. "
            match town:
                case "oslo":
                    "Fjords. "
                case "rome" | "lisbon":
                    "Sun. "
                case _:
                    f"{RULE}"
        else:
            "I stay. "
        if slow:
            f"All of {days}, slowly. "
        hotel(3 if slow else 5)
    with assistant:
        pass


def test_a_function_is_compiled_to_modules_unions_and_parameters():
    schema = schema_of(trip)
    towns = Union(
        (
            Module("oslo", (TextNode("Fjords. "),)),
            Module("rome-lisbon", (TextNode("Sun. "),)),
            Module("case", (TextNode(RULE),)),
        )
    )
    assert schema.name == "trip"
    assert schema.items == (
        Role("system", (TextNode(RULE),)),
        Role(
            "user",
            (
                TextNode("I have "),
                Param("days", 6),
                TextNode(". "),
                Union(
                    (
                        Module("abroad", (TextNode("I cross the border. "), towns)),
                        Module("else", (TextNode("I stay. "),)),
                    )
                ),
                Module("slow", (TextNode("All of "), Param("days", 6), TextNode(", slowly. "))),
                Module("hotel", (TextNode("A hotel of "), Param("stars", 2), TextNode(" stars. "))),
            ),
        ),
        Role("assistant"),
    )


def test_a_call_imports_what_its_conditions_say():
    assert trip("a week", True) == PMLPrompt(
        "trip",
        (Import("abroad", (), (Import("oslo"),)), Import("hotel", (("stars", "5"),))),
        (("days", "a week"),),
    )
    assert trip(days="ten", abroad=False, slow=True).items == (
        Import("else"),
        Import("slow", (("days", "ten"),)),
        Import("hotel", (("stars", "3"),)),
    )
    assert trip("x", True, "lisbon").items[0] == Import("abroad", (), (Import("rome-lisbon"),))
    assert trip("x", True, "paris").items[0] == Import("abroad", (), (Import("case"),))


def test_what_is_made_can_be_printed_saved_read_and_bound():
    schema = parse(to_pml(schema_of(trip)))
    assert schema == schema_of(trip)
    layout = lay_out(schema_of(trip), encode, GAP, TURNS, min_tokens=1)
    found = bind(trip("ten", True).asking("Why?"), layout, encode, key_of)
    text = read(found)
    assert text.startswith("{SBe brief. }{UI have ten.... I cross the border. Fjords. ")
    assert text.endswith("A hotel of 5. stars. }{A}{UWhy?}{A")


def test_conditions_are_plain_python_over_the_names_around_the_function():
    most = 3

    def many(n: int) -> bool:
        return n > most

    @program
    def party(n: int, who: str) -> None:
        if many(n):
            "Many. "
        elif not who:
            "Nobody. "
        elif who == "me too":
            "I. "
        if n > 1:
            hotel(n)
        if n > 2:
            hotel(n + 1)
        "End."

    union, first, second, end = schema_of(party).items
    assert isinstance(union, Union)
    assert [module.name for module in union.modules] == ["many-n", "not-who", "who-me-too"]
    assert [module.name for module in (first, second) if isinstance(module, Module)] == [
        "n-1",
        "n-2",
    ]
    assert end == TextNode("End.")
    assert party(4, "").items[0] == Import("many-n")
    assert party(1, "me too").items == (Import("who-me-too"),)
    inner = party(3, "x").items[1]
    assert inner == Import("n-2", (), (Import("hotel", (("stars", "4"),)),))


def test_texts_of_a_function_in_another_block_keep_their_white_space():
    @program
    def letter() -> None:
        """What a letter is."""
        """Dear all,
    it rains.
Yours"""

    (text,), first = schema_of(letter).items, inspect.unwrap(letter).__code__.co_firstlineno
    assert isinstance(text, TextNode)
    assert text.text == "Dear all,\n    it rains.\nYours"
    assert (text.at.line, text.at.column) == (first + 3, 9)


def no_length(days: str) -> None:
    f"For {days}."


def loops(days: str) -> None:
    "a"
    for _ in days:
        "b"


def assigns(days: str) -> None:
    days = days.strip()


def formats(days: Annotated[str, MaxTokens(3)]) -> None:
    f"For {days:>3}."


def computes(days: Annotated[str, MaxTokens(3)]) -> None:
    f"For {days.strip()}."


def calls(days: str) -> None:
    print(days)


def only_words(days: str) -> None:
    """A docstring is not part of it."""


def opens(path: str) -> None:
    with open(path):
        "a"


def returns() -> str:
    return "a"


def number() -> None:
    1


REFUSED: list[tuple[Callable[..., Any], int, str]] = [
    (no_length, 1, "parameter 'days' without a maximum length"),
    (loops, 2, "for _ in days:"),
    (assigns, 1, "days = days.strip()"),
    (formats, 1, "days:>3"),
    (computes, 1, "days.strip()"),
    (calls, 1, "a call of 'print'"),
    (only_words, 0, "without text besides its docstring"),
    (opens, 1, "with open(path):"),
    (returns, 1, "return 'a'"),
    (number, 1, "'1' in a prompt function"),
]


@pytest.mark.parametrize(("function", "line", "found"), REFUSED)
def test_what_cannot_be_compiled_is_refused_with_its_line(function, line, found):
    with pytest.raises(PMLError) as caught:
        program(function)
    assert Path(caught.value.file) == Path(__file__)
    assert caught.value.line == function.__code__.co_firstlineno + line
    assert found in caught.value.found


def test_what_is_no_function_or_has_no_source_is_refused():
    with pytest.raises(PMLError, match="decorated with `program`"):
        schema_of(len)
    made: dict[str, Any] = {}
    exec("def f():\n    'a'\n    'b'", made)
    for function in (len, lambda: "a", made["f"]):
        with pytest.raises(PMLError, match="def"):
            program(function)
