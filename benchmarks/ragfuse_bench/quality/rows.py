"""The rows of a data set in JSON or JSONL."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter


class Passage(BaseModel):
    """A passage under its title, if it has one."""

    title: str | None = None
    text: str

    def __str__(self) -> str:
        return f"{self.title}\n{self.text}".strip() if self.title else self.text


class PassagesRow(BaseModel):
    """A question over passages."""

    id: int | str | None = None
    question: str
    answers: list[str]
    ctxs: list[str | Passage]


class ContextRow(BaseModel):
    """LongBench's form: a question, or none for a summary, over one text."""

    id: int | str | None = Field(None, alias="_id")
    input: str = ""
    context: str
    answers: list[str]


ROWS: TypeAdapter[list[PassagesRow | ContextRow]] = TypeAdapter(list[PassagesRow | ContextRow])


def parsed(text: str) -> Any:
    """Return what a file of JSON says, or the list of JSONL's lines.

    Raises:
        ValueError: It is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        # texts in JSON may hold other ends of lines
        return [json.loads(line) for line in text.split("\n") if line.strip()]
