"""Schemas that pydantic, dataclasses and TypedDict write: each is decoded under its grammar, and
read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
import torch
from pydantic import BaseModel, Field, IPvAnyAddress, SecretStr, TypeAdapter
from typing_extensions import TypedDict

from ragfuse.hf.grammar import GrammarCompiler, GrammarProcessor, held_schema
from ragfuse.types.grammar import Grammar
from tests.twins.hf.test_grammar import bytes_tokenizer

LOOK = "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"
DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": LOOK}]}
"""What pydantic 2.12 writes for a Decimal; 2.9 and 2.14 write no pattern."""


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=1, max_length=5, pattern="^[a-z]+$")]


class Tree(BaseModel):
    size: int
    left: Tree | None = None


class Movie(TypedDict):
    title: Literal["Alien", "Brazil"]
    year: Annotated[int, Field(gt=1900, lt=2100)]


@dataclass
class Place:
    at: tuple[float, float]
    colour: Colour = Colour.RED


class Order(BaseModel):
    total: Decimal
    paid: Decimal | None
    shades: Annotated[list[Colour], Field(min_length=1, max_length=2)]


TYPES: list[Any] = [
    Decimal,
    datetime,
    date,
    time,
    timedelta,
    UUID,
    Order,
    Tree,
    Movie,
    Place,
    int,
    float,
    bool,
    Literal["a", 2],
    int | None,
    Cat | Dog,
    Annotated[Cat | Dog, Field(discriminator="kind")],
    IPvAnyAddress,
    SecretStr,
    tuple[int, bool],
    dict[str, Annotated[int, Field(ge=0)]],
    Annotated[Decimal, Field(gt=0)],
    Annotated[float, Field(gt=0, lt=0.5)],
    Annotated[int, Field(multiple_of=5, ge=0, lt=100)],
    Annotated[set[bool], Field(min_length=1, max_length=1)],
]


def written(schema: Mapping[str, Any], prefers: str, n: int = 400) -> str:
    """A text of the grammar by a model that likes some letters best, and then the end."""
    words = bytes_tokenizer()
    grammars = GrammarCompiler(words, len(words), [256])
    processor, ids = GrammarProcessor(grammars, Grammar.json(schema)), list[int]()
    likes = torch.arange(len(words), 0, -1).float()
    likes[256] = 500.0
    likes[words(prefers, add_special_tokens=False).input_ids] = 1000.0
    while len(ids) < n and (not ids or ids[-1] != 256):
        if len(ids) == 60:
            likes[words('"}]', add_special_tokens=False).input_ids] = 2000.0
        ids.append(int(processor(torch.tensor([[0, *ids]]), likes[None].clone()).argmax()))
    assert ids[-1] == 256, words.decode(ids)
    return str(words.decode(ids[:-1]))


def left_out(schema, caplog):
    """What is logged of a schema."""
    held_schema.cache_clear()
    caplog.clear()
    held_schema(json.dumps(schema))
    return caplog.messages


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("prefers", ['"}]', "1"])
def test_an_answer_under_the_schema_of_a_type_is_read_back_as_that_type(kind, prefers, caplog):
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    text = written(schema, prefers)
    try:
        adapter.validate_json(text)
    except ValueError:
        assert left_out(schema, caplog), text  # what was not held is said


@pytest.mark.parametrize("prefers", ['"', "1"])
def test_an_alternative_that_cannot_be_held_is_left_out_where_another_can(prefers, caplog):
    schema = {"type": "object", "properties": {"total": DECIMAL}, "required": ["total"]}
    text = written(schema, prefers)
    assert isinstance(json.loads(text)["total"], int | float)
    assert left_out(schema, caplog) == []


def test_a_pattern_that_cannot_be_held_is_named_with_its_field(caplog):
    total = {"anyOf": [{"type": "string", "pattern": LOOK}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"total": total}, "required": ["total"]}
    (note,) = left_out(schema, caplog)
    assert "total: pattern" in note
    assert isinstance(json.loads(written(schema, '"'))["total"], str)
