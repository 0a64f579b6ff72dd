"""Converts prompt templates of LangChain and LlamaIndex, texts, and (role, text) pairs to PML schemas.

No framework is imported: templates are recognised by their attributes. The variables become parameters of the schema,
so that the fixed text is encoded once; `filled` makes a prompt from their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from string import Formatter
from types import MappingProxyType
from typing import Any, Literal, cast

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from ragfuse.errors import PMLError
from ragfuse.schemas.nodes import (
    Item,
    Param,
    PMLPrompt,
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
    {"human": "user", "user": "user", "system": "system", "ai": "assistant", "assistant": "assistant"}
)


class _Chat(Extension):
    """LlamaIndex's `{% chat role="user" %}` ... `{% endchat %}`, parsed to a call block of the role."""

    tags = {"chat"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        parser.stream.expect("name:role")
        parser.stream.expect("assign")
        role = nodes.Const(parser.stream.expect("string").value)
        body = parser.parse_statements(("name:endchat",), drop_needle=True)
        return nodes.CallBlock(role, [], [], body, lineno=line)


def from_template(name: str, template: Any, max_tokens: int | Mapping[str, int], syntax: Syntax = "f-string") -> Schema:
    """Return the schema of a template.

    Args:
        name: Name of the schema.
        template: A text, (role, text) pairs, or a prompt template of LangChain or LlamaIndex.
        max_tokens: The most tokens of each variable: one number for all, or one by name.
        syntax: How variables are written in a text or in pairs; a framework's templates know their own syntax.

    Raises:
        PMLError: The template has logic, loops, formats or placeholders for conversations.
    """
    items: list[Item] = []
    for role, parts in _messages(name, template, syntax):
        found = joined(_items(name, parts, max_tokens))
        if role and role not in _ROLES:
            raise PMLError(f"role '{role}'", "system, user (human) or assistant (ai)", name)
        items += [Role(_ROLES[role], found)] if role else found
    return Schema(name, joined(items))


def filled(schema: Schema, values: Mapping[str, object]) -> PMLPrompt:
    """Return the prompt over the schema of a template, with these values of its variables."""
    return PMLPrompt(schema.name, (), tuple((name, str(value)) for name, value in values.items()))


def parsed(name: str, text: str, syntax: Syntax, line: int = 1) -> Iterator[Part]:
    """Yield the parts of a text with variables; name and line say where it begins, for error messages."""
    if syntax == "jinja2":
        yield from _parts(name, _tree(name, text))
        return
    if syntax != "f-string":
        raise PMLError(f"syntax '{syntax}'", "f-string or jinja2", name)
    try:
        for literal, variable, spec, conversion in Formatter().parse(text):
            line += literal.count("\n")
            if variable is not None and (spec or conversion or not is_name(variable)):
                wanted = "its plain name, without logic or format"
                raise PMLError(f"variable '{variable}' in a template", wanted, name, line, 1)
            yield literal, variable, line
    except ValueError as error:
        found = f"a template that str.format cannot read ({error})"
        raise PMLError(found, "{{ and }} for literal braces", name) from error


def _messages(name: str, template: Any, syntax: Syntax) -> Iterator[tuple[str, Iterable[Part]]]:
    """Yield the role and the parts of every message; role "": text outside of messages."""
    rich = getattr(template, "template_str", None)  # RichPromptTemplate
    plain = getattr(template, "template", None)  # PromptTemplate of both
    if isinstance(rich, str) or (isinstance(template, str) and syntax == "jinja2"):
        yield from _chats(name, rich or template)
    elif isinstance(template, str):
        yield "", parsed(name, template, syntax)
    elif isinstance(plain, str):
        yield "", parsed(name, plain, _syntax_of(template))
    else:
        for message in getattr(template, "messages", None) or getattr(template, "message_templates", template):
            yield _message(name, message, syntax)


def _chats(name: str, text: str) -> Iterator[tuple[str, Iterable[Part]]]:
    """Split a jinja2 text into its `{% chat %}` blocks and the text between them, without mere white space."""
    for is_block, group in groupby(_tree(name, text), lambda node: isinstance(node, nodes.CallBlock)):
        for role, body in [(node.call.value, node.body) for node in group] if is_block else [("", list(group))]:
            parts = list(_parts(name, body))
            if role or any(literal.strip() or variable is not None for literal, variable, _ in parts):
                yield role, parts


def _message(name: str, message: Any, syntax: Syntax) -> tuple[str, Iterable[Part]]:
    if isinstance(message, tuple | list) and len(message) == 2:
        return str(message[0]), parsed(name, str(message[1]), syntax)
    role = getattr(message, "role", None) or getattr(message, "type", None) or type(message).__name__
    role = str(getattr(role, "value", role))
    role = re.sub(r"(message|prompt|template|_|chunk)+$", "", role.lower())
    prompt = getattr(message, "prompt", None)
    if isinstance(text := getattr(prompt, "template", None), str):
        return role, parsed(name, text, _syntax_of(prompt))
    if isinstance(text := getattr(message, "content", None), str):
        is_template = hasattr(message, "blocks")  # LangChain's messages are no templates
        return role, parsed(name, text, "f-string") if is_template else [(text, None, 1)]
    wanted = "messages with text: a conversation has no maximum length"
    raise PMLError(f"{type(message).__name__} in a template", wanted, name)


def _syntax_of(prompt: Any) -> Syntax:
    """Return the syntax of a framework's prompt template, by default "f-string"."""
    return cast(Syntax, getattr(prompt, "template_format", "f-string"))


def _items(name: str, parts: Iterable[Part], max_tokens: int | Mapping[str, int]) -> Iterator[Item]:
    for literal, variable, line in parts:
        if literal:
            yield TextNode(literal)
        if variable is not None:
            length = max_tokens if isinstance(max_tokens, int) else max_tokens.get(variable, 0)
            at = SourcePosition(name, line, 1)
            if length < 1:
                raise at.error(f"variable '{variable}' without a maximum length", f"max_tokens={{'{variable}': ...}}")
            yield Param(variable, length, at=at)


def _tree(name: str, text: str) -> Sequence[Any]:
    try:
        return Environment(extensions=[_Chat]).parse(text).body
    except TemplateSyntaxError as error:
        found = f"a template that jinja2 cannot read ({error})"
        raise PMLError(found, "valid jinja2", name, error.lineno, 1) from error


def _parts(name: str, tree: Sequence[Any]) -> Iterator[Part]:
    """Yield the parts of parsed jinja2."""
    for node in tree:
        for part in node.nodes if isinstance(node, nodes.Output) else (node,):
            if isinstance(part, nodes.TemplateData):
                yield part.data, None, part.lineno
            elif isinstance(part, nodes.Name):
                yield "", part.name, part.lineno
            else:
                found = f"'{type(part).__name__.lower()}' of jinja2 in a template"
                raise PMLError(found, "texts and plain variables only", name, part.lineno, 1)
