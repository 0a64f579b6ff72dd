"""The writer of PML: turns nodes into text that `schemas/pml.py` parses back to equal nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from ragfuse.schemas.nodes import (
    Import,
    Item,
    Module,
    Param,
    PMLPrompt,
    Role,
    Scaffold,
    Schema,
    TextNode,
    Union,
)
from ragfuse.types.texts import whole_text

NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot represent."""


def to_pml(node: Schema | PMLPrompt | Import | Scaffold | Item) -> str:
    """Return a node as PML text that parses back to an equal node, with neighbouring texts merged.

    Texts are written as `whole_text` has them, and U+FFFD stands for characters that XML cannot
    represent.
    """
    return NO_TEXT.sub("\ufffd", whole_text(_written(node)))


def _written(node: Any) -> str:
    if isinstance(node, TextNode):
        return escape(node.text, {"\r": "&#13;"})
    tag, attributes, items = _parts_of(node)
    given = (
        attributes
        if isinstance(node, Import | PMLPrompt)
        else [pair for pair in attributes if pair[1]]
    )
    head = " ".join([tag, *(f"{name}={_quoted(value)}" for name, value in given)])
    inside = "".join(map(_written, items))
    return f"<{head}>{inside}</{tag}>" if inside else f"<{head}/>"


def _parts_of(node: Any) -> tuple[str, Iterable[tuple[str, str]], Iterable[Any]]:
    """Return the tag, attributes and items of a node."""
    match node:
        case Schema(name, items, scaffolds):
            return "schema", [("name", name)], (*items, *scaffolds)
        case Module(name, items, cache):
            return "module", [("name", name), ("cache", "" if cache else "false")], items
        case Union(modules, scaffold):
            return "union", [("scaffold", scaffold)], modules
        case Param(name, length, scaffold):
            return "param", [("name", name), ("len", str(length)), ("scaffold", scaffold)], ()
        case Scaffold(modules):
            return "scaffold", [("modules", " ".join(modules))], ()
        case Role(role, items):
            return role, (), items
        case Import(name, args, items):
            return name, args, items
        case PMLPrompt(schema, items, args):
            return "prompt", [("schema", schema), *args], items
    raise TypeError(f"{node!r} cannot be written as PML.")


def _quoted(value: str) -> str:
    return quoteattr(value, {"\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})
