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
        SettingsError, match=rf"^{kind.__name__} has no argument 'xyzzy'\. Valid names are: \w+"
    ):
        kind(xyzzy=1)


@pytest.mark.parametrize(
    ("kind", "given", "argument", "told"),
    [
        (Walnut, {"wieght": 2}, "wieght", "Did you mean weight?"),
        (Hazel, {"wieght": 2, "origin": "Piedmont"}, "wieght", "Did you mean weight?"),
        (Hazel, {"orign": "Piedmont"}, "orign", "Did you mean origin?"),
        (Purple, {"shad": 1, "origin": ""}, "shad", "Did you mean shade?"),
        (Hazel, {}, "origin", "required."),
        (Hazel, {"grams": -1, "origin": ""}, "grams", "found -1."),
        (Hazel, {"key": 7, "origin": ""}, "key", "valid string."),
        (Hazel, {"grams": "x" * 4000, "origin": ""}, "grams", "xxx."),
    ],
)
def test_what_is_refused_is_told_with_what_is_wanted(kind, given, argument, told):
    with pytest.raises(SettingsError) as refused:
        kind(**given)
    assert refused.value.argument == argument
    assert argument in str(refused.value)
    assert str(refused.value).endswith(told)
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
