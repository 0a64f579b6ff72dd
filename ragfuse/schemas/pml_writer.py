"""The writer of PML: turns nodes into text that `schemas/pml.py` parses back to equal nodes."""

from __future__ import annotations

import re
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from ragfuse.errors import PMLError
from ragfuse.schemas.nodes import (
    Import,
    Item,
    MessageNode,
    Module,
    Param,
    PMLPrompt,
    Role,
    Scaffold,
    Schema,
    TextNode,
    Union,
)
from ragfuse.types.whole_text import whole_text

NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot represent."""


def to_pml(node: Schema | PMLPrompt | Import | MessageNode | Scaffold | Item) -> str:
    """Return a node as PML text that parses back to an equal node, with neighbouring texts merged.

    Texts are written as `whole_text` has them.

    Raises:
        PMLError: A text has a character that XML cannot represent.
    """
    parts: list[str] = []
    _write(node, parts)
    text = whole_text("".join(parts))
    if bad := NO_TEXT.search(text):
        raise PMLError(f"character {bad.group()!r} in a text", "characters that XML allows")
    return text


def _write(node: Schema | PMLPrompt | Import | MessageNode | Scaffold | Item, parts: list[str]) -> None:
    if isinstance(node, TextNode):
        parts.append(_escaped(node.text))
        return
    tag, attributes, items = _parts_of(node)
    head = "".join([tag, *(f" {name}={_quoted(value)}" for name, value in attributes)])
    if not items:
        parts.append(f"<{head}/>")
        return
    parts.append(f"<{head}>")
    for item in items:
        _write(item, parts)
    parts.append(f"</{tag}>")


def _parts_of(
    node: Schema | PMLPrompt | Import | MessageNode | Scaffold | Item,
) -> tuple[str, list[tuple[str, str]], list[Any]]:
    """Return the tag, attributes and items of a node."""
    match node:
        case Schema(name, items, scaffolds):
            return "schema", [("name", name)], [*items, *scaffolds]
        case Module(name, items, cache):
            return "module", [("name", name), *([] if cache else [("cache", "false")])], list(items)
        case Union(modules, scaffold):
            return "union", [("scaffold", scaffold)] if scaffold else [], list(modules)
        case Param(name, length, scaffold):
            attributes = [("name", name), ("len", str(length))]
            return "param", [*attributes, *([("scaffold", scaffold)] if scaffold else [])], []
        case Scaffold(modules):
            return "scaffold", [("modules", " ".join(modules))], []
        case Role(role, items):
            return role, [], list(items)
        case MessageNode(role, text):
            return role, [], [TextNode(text)] if text else []
        case Import(name, args, items):
            return name, list(args), list(items)
        case PMLPrompt(schema, items, args, ending=ending):
            return "prompt", [("schema", schema), *args], [*items, *([TextNode(ending)] if ending else [])]
        case _:
            raise TypeError(f"{node!r} cannot be written as PML.")


def _escaped(text: str) -> str:
    return escape(text, {"\r": "&#13;"})


def _quoted(value: str) -> str:
    return quoteattr(value, {"\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})
