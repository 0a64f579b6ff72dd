"""Schemas laid out over a tokenizer whose tokens are characters, so that positions can be counted by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragfuse.core import ChunkKey, Prompt, token_digest
from ragfuse.text.bind import Bound, bind
from ragfuse.text.nodes import Item, Module, Param, Request, Role, Schema, Text, Union
from ragfuse.text.pml import parse_prompt, parse_schema
from ragfuse.text.schema import PLAIN, Layout, Run, Wrapping, lay_out

GAP = 0  # the placeholder
TURNS = Wrapping(("{S", "}"), ("{U", "}"), ("{A", "}"), "{A")


def encode(text: str, special: bool) -> list[int]:
    """One token a character; of a template's own text other ones."""
    return [ord(char) + 1000 * special for char in text]


def said(tokens: Sequence[int]) -> str:
    """Tokens as text, `_` for what stands in for an argument."""
    return "".join("_" if token == GAP else chr(token % 1000) for token in tokens)


def key_of(run: Run) -> ChunkKey:
    return ChunkKey("m", token_digest(run.tokens), "", run.layout())


def laid(inside: str, wrapping: Wrapping = PLAIN, min_tokens: int = 1, fixed: bool = False) -> Layout:
    """The layout of a schema `s`."""
    schema = parse_schema(f'<schema name="s">{inside}</schema>')
    return lay_out(schema, encode, GAP, wrapping, min_tokens=min_tokens, fixed=fixed)


def bound(layout: Layout, inside: str, args: str = "", blend: bool = False) -> Bound:
    """A prompt over it."""
    return bind(parse_prompt(f'<prompt schema="s" {args}>{inside}</prompt>'), layout, encode, key_of, blend)


def shown(prompt: Prompt) -> list[tuple[str, int, str]]:
    """(kind, start, text) of every segment."""
    return [(segment.kind, segment.start, said(segment.tokens)) for segment in prompt.segments]


def read(prompt: Prompt) -> str:
    """The text as it stands, with `.` for every position without a token."""
    text = ""
    for segment in prompt.segments:
        text += "." * (segment.start - len(text)) + said(segment.tokens)
    return text


@dataclass(frozen=True)
class Told:
    """One token as the slow twin has it."""

    owner: str
    position: int
    token: int
    param: str = ""


def twin(schema: Schema, wrapping: Wrapping) -> list[Told]:
    """Every token of a schema, one by one, straight from the rules: the slow twin of `lay_out`."""
    return list(_told(schema.items, "", 0, wrapping))


def length(items: tuple[Item, ...], wrapping: Wrapping) -> int:
    """Positions that items take."""
    n = 0
    for i, item in enumerate(items):
        if isinstance(item, Text):
            n += 0 if _is_markup(items, i) else len(item.text)
        elif isinstance(item, Param):
            n += item.length
        elif isinstance(item, Module):
            n += length(item.items, wrapping)
        elif isinstance(item, Union):
            n += max((length(module.items, wrapping) for module in item.modules), default=0)
        else:
            before, after = wrapping.around(item.role)
            n += len(before) + length(item.items, wrapping) + len(after)
    return n


def _is_markup(items: tuple[Item, ...], i: int) -> bool:
    item, around = items[i], (*items[max(0, i - 1) : i], *items[i + 1 : i + 2])
    return isinstance(item, Text) and not item.text.strip() and any(isinstance(each, Role) for each in around)


def _told(items: tuple[Item, ...], owner: str, at: int, wrapping: Wrapping) -> Iterator[Told]:
    for i, item in enumerate(items):
        here = at + length(items[:i], wrapping)
        if i and isinstance(items[i - 1], Text) and _is_markup(items[: i + 1], i - 1):
            here = at + length(items[: i - 1], wrapping)
        if isinstance(item, Text) and not _is_markup(items, i):
            yield from (Told(owner, here + j, ord(char)) for j, char in enumerate(item.text))
        elif isinstance(item, Param):
            ids = [ord(char) for char in item.scaffold][: item.length]
            ids += [GAP] * (item.length - len(ids))
            yield from (Told(owner, here + j, token, item.name) for j, token in enumerate(ids))
        elif isinstance(item, Module):
            yield from _told(item.items, f"{owner}/{item.name}".strip("/"), here, wrapping)
        elif isinstance(item, Union):
            for module in item.modules:
                yield from _told(module.items, f"{owner}/{module.name}".strip("/"), here, wrapping)
        elif isinstance(item, Role):
            before, after = wrapping.around(item.role)
            yield from (Told(owner, here + j, ord(char) + 1000) for j, char in enumerate(before))
            inside = here + len(before)
            yield from _told(item.items, owner, inside, wrapping)
            end = inside + length(item.items, wrapping)
            yield from (Told(owner, end + j, ord(char) + 1000) for j, char in enumerate(after))


__all__ = ["Request"]
