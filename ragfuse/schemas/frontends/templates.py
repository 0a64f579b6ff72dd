"""Converts prompt templates of LangChain and LlamaIndex, texts, and (role, text) pairs to PML
schemas.

No framework is imported: templates are recognised by their attributes. The variables become
parameters of the schema, so that the fixed text is encoded once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from string import Formatter
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from ragfuse.errors import PMLError
from ragfuse.schemas.nodes import (
    Item,
    Param,
    Role,
    RoleName,
    Schema,
    SourcePosition,
    TextNode,
    joined,
)
from ragfuse.schemas.pml import is_name

Syntax = Literal["f-string", "jinja2"]
Part = tuple[str, str | None, int]
"""A literal text, the variable after it or None, and the line on which it ends."""

_ROLES: Mapping[str, RoleName] = MappingProxyType(
    {
        "human": "user",
        "user": "user",
        "system": "system",
        "ai": "assistant",
        "assistant": "assistant",
    }
)


_VARIABLE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_CHAT = re.compile(
    r"""\{%\s*chat\s+role\s*=\s*["'](\w*)["']\s*%\}([^{]*(?:\{(?!%)[^{]*)*)\{%\s*endchat\s*%\}"""
)
"""Variables of jinja2, and LlamaIndex's chat blocks."""


def from_template(
    name: str, template: Any, max_tokens: int | Mapping[str, int], syntax: Syntax = "f-string"
) -> Schema:
    """Return the schema of a template.

    Args:
        name: Name of the schema.
        template: A text, (role, text) pairs, or a prompt template of LangChain or LlamaIndex.
        max_tokens: The most tokens of each variable: one number for all, or one by name.
        syntax: How variables are written in a text or in pairs; a framework's templates know their
            own syntax.

    Raises:
        PMLError: The template has logic, loops, formats or placeholders for conversations.
    """
    items: list[Item] = []
    for role, text, written in _messages(name, template, syntax):
        found = joined(
            _items(parsed(name, text, written), name, max_tokens) if written else (TextNode(text),)
        )
        if role and role not in _ROLES:
            raise PMLError(f"role '{role}'", "system, user (human) or assistant (ai)", name)
        items += [Role(_ROLES[role], found)] if role else found
    return Schema(name, joined(items))


def parsed(name: str, text: str, syntax: Syntax, line: int = 1) -> Iterator[Part]:
    """Yield the parts of a text with variables; name and line say where it begins, for error
    messages.
    """
    if syntax not in get_args(Syntax):
        raise PMLError(f"syntax '{syntax}'", "f-string or jinja2", name)
    for literal, variable in _jinja(name, text) if syntax == "jinja2" else _braces(name, text):
        line += literal.count("\n")
        if variable is not None and not is_name(variable):
            wanted = "its plain name, without logic or format"
            raise PMLError(f"variable '{variable}' in a template", wanted, name, line, 1)
        yield literal, variable, line


def _braces(name: str, text: str) -> Iterator[tuple[str, str | None]]:
    try:
        for literal, variable, spec, conversion in Formatter().parse(text):
            yield literal, f"{variable}:{conversion or spec}" if spec or conversion else variable
    except ValueError as error:
        found = f"a template that str.format cannot read ({error})"
        raise PMLError(found, "{{ and }} for literal braces", name) from error


def _jinja(name: str, text: str) -> Iterator[tuple[str, str | None]]:
    pieces = _VARIABLE.split(text)
    if found := re.search(r"\{[{%#].*", "".join(pieces[::2])):
        raise PMLError(f"'{found[0][:40]}' in a template", "texts and plain variables only", name)
    yield from zip(pieces[::2], (*pieces[1::2], None), strict=True)


def _messages(name: str, template: Any, syntax: Syntax) -> Iterator[tuple[str, str, Syntax | None]]:
    """Yield the role, text and syntax of every message.

    The role is "" for text outside of messages, the syntax None for text without variables.
    """
    rich = getattr(template, "template_str", None)  # RichPromptTemplate
    plain = getattr(template, "template", None)  # PromptTemplate of both
    if isinstance(rich, str) or (isinstance(template, str) and syntax == "jinja2"):
        # text, role, its message, text, ...
        pieces = _CHAT.split((rich or template).removesuffix("\n"))
        for at, piece in enumerate(pieces):
            if at % 3 == 1:
                yield piece, pieces[at + 1], "jinja2"
            elif at % 3 == 0 and piece.strip():
                yield "", piece, "jinja2"
    elif isinstance(template, str):
        yield "", template, syntax
    elif isinstance(plain, str):
        yield "", plain, _syntax_of(template)
    else:
        for message in getattr(template, "messages", None) or getattr(
            template, "message_templates", template
        ):
            yield _message(name, message, syntax)


def _message(name: str, message: Any, syntax: Syntax) -> tuple[str, str, Syntax | None]:
    if isinstance(message, tuple | list) and len(message) == 2:
        return str(message[0]), str(message[1]), syntax
    role = (
        getattr(message, "role", None) or getattr(message, "type", None) or type(message).__name__
    )
    role = str(getattr(role, "value", role))
    role = re.sub(r"(message|prompt|template|_|chunk)+$", "", role.lower())
    prompt = getattr(message, "prompt", None)
    if isinstance(text := getattr(prompt, "template", None), str):
        return role, text, _syntax_of(prompt)
    if isinstance(text := getattr(message, "content", None), str):
        # LangChain's messages are no templates
        return role, text, "f-string" if hasattr(message, "blocks") else None
    wanted = "messages with text: a conversation has no maximum length"
    raise PMLError(f"{type(message).__name__} in a template", wanted, name)


def _syntax_of(prompt: Any) -> Syntax:
    """Return the syntax of a framework's prompt template, by default "f-string"."""
    return cast(Syntax, getattr(prompt, "template_format", "f-string"))


def _items(parts: Iterable[Part], name: str, max_tokens: int | Mapping[str, int]) -> Iterator[Item]:
    for literal, variable, line in parts:
        if literal:
            yield TextNode(literal)
        if variable is not None:
            length = max_tokens if isinstance(max_tokens, int) else max_tokens.get(variable, 0)
            at = SourcePosition(name, line, 1)
            if length < 1:
                raise at.error(
                    f"variable '{variable}' without a maximum length",
                    f"max_tokens={{'{variable}': ...}}",
                )
            yield Param(variable, length, at=at)
