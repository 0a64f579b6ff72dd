"""What constructors refuse is told in words: a name that there is not, and a value that
cannot be.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragfuse import Ask, Engine, PMLTemplate, Settings, SettingsError
from ragfuse.remote import RemoteEngine
from ragfuse.types.arguments import checks_arguments


@checks_arguments
@dataclass(frozen=True)
class Walnut:
    """A plain class."""

    weight: int = 1


@checks_arguments
class Hazel(BaseModel):
    """A class with fields."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    weight: int = Field(default=1, ge=0, alias="grams")
    key: str = Field(default="", repr=False)
    origin: str


class Purple(Hazel):
    """One of a user's own."""

    shade: float = 0.5


@pytest.mark.parametrize("kind", [Ask, Engine, PMLTemplate, RemoteEngine, Settings])
def test_a_misspelt_argument_of_a_public_class_is_told_with_the_class(kind):
    with pytest.raises(
        SettingsError, match=rf"^{kind.__name__} has no argument 'xyzzy'\. It takes: \w+"
    ):
        kind(xyzzy=1)


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (Walnut, {"wieght": 2}, "Walnut has no argument 'wieght'. Did you mean weight?"),
        (Ask, {"ratoi": 1}, "Ask has no argument 'ratoi'. Did you mean ratio?"),
        (Settings, {"modle": "x"}, "Settings has no argument 'modle'. Did you mean model?"),
        (
            Hazel,
            {"wieght": 2, "origin": "Piedmont"},
            "Hazel has no argument 'wieght'. Did you mean weight?",
        ),
        (Hazel, {"gram": 2}, "Hazel has no argument 'gram'. Did you mean grams?"),
        (Hazel, {"orign": "Piedmont"}, "Hazel has no argument 'orign'. Did you mean origin?"),
        (Purple, {"shad": 1, "origin": ""}, "Purple has no argument 'shad'. Did you mean shade?"),
        (Hazel, {}, "Hazel needs the argument 'origin', which is missing."),
        (
            Hazel,
            {"grams": -1, "origin": ""},
            "grams: Input should be greater than or equal to 0, found -1.",
        ),
        (
            Hazel,
            {"weight": 2.5, "origin": ""},
            (
                "weight: Input should be a valid integer, got a number with a fractional part,"
                " found 2.5."
            ),
        ),
        (Hazel, {"key": 7, "origin": ""}, "key: Input should be a valid string."),
        (Purple, {"shade": [], "origin": ""}, "shade: Input should be a valid number, found []."),
    ],
)
def test_what_is_refused_is_told_with_what_is_wanted(kind, given, told):
    with pytest.raises(SettingsError) as refused:
        kind(**given)
    assert str(refused.value) == told


def test_the_error_knows_which_argument_it_is_about():
    with pytest.raises(SettingsError) as refused:
        Hazel(grams=-1, origin="")
    assert refused.value.argument == "grams"


def test_a_value_is_told_in_part():
    with pytest.raises(SettingsError) as refused:
        Hazel(grams="x" * 4000, origin="")
    assert len(str(refused.value)) < 200


def test_what_is_right_is_taken_as_before():
    assert Walnut(2) == Walnut(weight=2)
    assert Hazel(grams=2, origin="Piedmont") == Hazel(weight=2, origin="Piedmont")
    assert list(inspect.signature(Ask).parameters)[:2] == ["max_tokens", "policy"]
    with pytest.raises(TypeError, match="positional"):
        Walnut(1, 2)


def test_the_error_of_another_class_is_left_to_itself():
    class Inner(BaseModel):
        """Not decorated."""

        size: int

    @checks_arguments
    class Outer(BaseModel):
        """Makes another one."""

        def __init__(self) -> None:
            super().__init__()
            Inner(size="none")

    with pytest.raises(ValidationError, match="Inner"):
        Outer()
