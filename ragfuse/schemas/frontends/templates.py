"""Converts prompt templates of LangChain and LlamaIndex, texts, and (role, text) pairs to PML schemas.

No framework is imported: templates are recognised by their attributes. The variables become parameters of the schema,
so that the fixed text is encoded once; `filled` makes a prompt from their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from types import MappingProxyType
from typing import Any, Literal, cast

from ragfuse.errors import PMLError
from ragfuse.schemas.nodes import Item, Param, PMLPrompt, Role, RoleName, Schema, SourcePosition, TextNode, joined
from ragfuse.schemas.pml import is_name

Syntax = Literal["f-string", "mustache", "jinja2"]
Pairs = Sequence[tuple[str, str]]

_ROLES: Mapping[str, RoleName] = MappingProxyType(
    {"human": "user", "user": "user", "system": "system", "ai": "assistant", "assistant": "assistant"}
)
_CHAT = re.compile(r"""{%(-?)\s*(?:chat\s+role\s*=\s*["'](?P<role>\w+)["']|endchat)\s*(-?)%}""")
_JINJA = re.compile(r"{#|(?<!{){{-?([^{}]*?)-?}}")
_MUSTACHE = re.compile(r"(?<!{)(?:{{{([^{}]*)}}}|{{([^{}]*)}})")


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
    for role, text, text_syntax in _pairs(name, template, syntax):
        text_items = joined(_items(name, text, text_syntax, max_tokens))
        items += [Role(_role(name, role), text_items)] if role else text_items
    return Schema(name, joined(items))


def filled(schema: Schema, values: Mapping[str, object]) -> PMLPrompt:
    """Return the prompt over the schema of a template, with these values of its variables."""
    return PMLPrompt(schema.name, (), tuple((name, str(value)) for name, value in values.items()))


def _pairs(name: str, template: Any, syntax: Syntax) -> Iterator[tuple[str, str, Syntax]]:
    """Yield (role, text, syntax) of every message; role "": text outside of messages."""
    if isinstance(template, str):
        yield from _chats(template, syntax)
    elif isinstance(text := getattr(template, "template_str", None), str):  # RichPromptTemplate
        yield from _chats(text, "jinja2")
    elif isinstance(text := getattr(template, "template", None), str):  # PromptTemplate of both
        yield "", text, _syntax_of(template)
    else:
        messages = getattr(template, "messages", None) or getattr(template, "message_templates", None) or template
        if not isinstance(messages, Sequence):
            raise PMLError(
                f"a template of type {type(template).__name__}", "messages, a text, or (role, text) pairs", name
            )
        for message in messages:
            yield _message(name, message, syntax)


def _chats(text: str, syntax: Syntax) -> Iterator[tuple[str, str, Syntax]]:
    """Split a jinja2 text into its `{% chat %}` blocks and the text between them, without mere white space."""
    done, dash, opening, has_blocks = 0, "", None, False
    for tag in _CHAT.finditer(text) if syntax == "jinja2" else ():
        before, role, behind = tag.groups()
        if opening is None and role is not None:
            opening = tag
        elif opening is not None and role is None:
            if (between := _strip_at_dashes(text[done : opening.start()], dash, opening[1])).strip():
                yield "", between, syntax
            yield opening["role"], _strip_at_dashes(text[opening.end() : tag.start()], opening[3], before), syntax
            done, dash, opening, has_blocks = tag.end(), behind, None, True
    rest = _strip_at_dashes(text[done:], dash, "")
    if not has_blocks or rest.strip():
        yield "", rest, syntax


def _strip_at_dashes(text: str, before: str, behind: str) -> str:
    """Strip a text between two jinja2 tags on the sides where a tag has a dash, as in `{%-`."""
    text = text.lstrip() if before == "-" else text
    return text.rstrip() if behind == "-" else text


def _message(name: str, message: Any, syntax: Syntax) -> tuple[str, str, Syntax]:
    if isinstance(message, tuple | list) and len(message) == 2:
        return str(message[0]), str(message[1]), syntax
    role = getattr(message, "role", None) or getattr(message, "type", None) or type(message).__name__
    role = str(getattr(role, "value", role))
    role = re.sub(r"(message|prompt|template|_|chunk)+$", "", role.lower())
    prompt = getattr(message, "prompt", None)
    if isinstance(text := getattr(prompt, "template", None), str):
        return role, text, _syntax_of(prompt)
    if isinstance(text := getattr(message, "content", None), str):  # LangChain's messages are no templates
        return role, text if hasattr(message, "blocks") else re.sub(r"[{}]", r"\g<0>\g<0>", text), "f-string"
    raise PMLError(
        f"{type(message).__name__} in a template", "messages with text: a conversation has no maximum length", name
    )


def _syntax_of(prompt: Any) -> Syntax:
    """Return the syntax of a framework's prompt template, by default "f-string"."""
    return cast(Syntax, getattr(prompt, "template_format", "f-string"))


def _role(name: str, role: str) -> RoleName:
    if role not in _ROLES:
        raise PMLError(f"role '{role}'", "system, user (human) or assistant (ai)", name)
    return _ROLES[role]


def _items(name: str, text: str, syntax: Syntax, max_tokens: int | Mapping[str, int]) -> Iterator[Item]:
    line, counted = 1, 0
    for literal, variable, at in parsed(name, text, syntax):
        if literal:
            yield TextNode(literal)
        if variable is not None:
            line, counted = line + text.count("\n", counted, at), max(counted, at)
            yield _param(variable, max_tokens, SourcePosition(name, line, 1))


def _param(variable: str, max_tokens: int | Mapping[str, int], at: SourcePosition) -> Param:
    if not is_name(variable) or variable == "schema":
        raise at.error(f"'{variable}' in a template", "the plain name of a variable, without logic or format")
    length = max_tokens if isinstance(max_tokens, int) else max_tokens.get(variable, 0)
    if length < 1:
        raise at.error(f"variable '{variable}' without a maximum length", f"max_tokens={{'{variable}': ...}}")
    return Param(variable, length, at=at)


def parsed(name: str, text: str, syntax: Syntax) -> Iterator[tuple[str, str | None, int]]:
    """Yield (literal text, variable after it or None, its approximate place in the text).

    `name` is the template's name for error messages.
    """
    if syntax == "f-string":
        yield from _formatted(name, text)
        return
    is_jinja, done, dash = syntax == "jinja2", 0, ""
    for lo, hi, variable in _jinja_variables(text) if is_jinja else _mustache_variables(text):
        literal, tag = _plain(name, text, done, lo), text[lo:hi] if is_jinja else ""
        yield _strip_at_dashes(literal, dash, tag[2:3]), variable, lo
        done, dash = hi, tag[-3:-2]
    yield _strip_at_dashes(_plain(name, text, done, len(text)), dash, ""), None, len(text)


def _jinja_variables(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield (lo, hi, name) of the variables of a jinja2 template, and of its comments (name None)."""
    at = 0
    while found := _JINJA.search(text, at):
        at = found.end()
        if found[1] is not None:
            yield found.start(), at, found[1].strip()
            continue
        end = text.find("#}", at)
        if end < 0:  # and no later comment ends either
            yield from (
                (each.start(), each.end(), each[1].strip()) for each in _JINJA.finditer(text, at) if each[1] is not None
            )
            return
        at = end + 2
        yield found.start(), at, None


def _mustache_variables(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield (lo, hi, name) of the variables of a mustache template."""
    for found in _MUSTACHE.finditer(text):
        yield found.start(), found.end(), found[found.lastindex or 0].strip()


def _formatted(name: str, text: str) -> Iterator[tuple[str, str | None, int]]:
    at = 0
    try:
        for literal, variable, spec, conversion in Formatter().parse(text):
            at += len(literal)
            name_with_format = (
                variable if variable is None else f"{variable}{'!' if conversion else ''}{':' if spec else ''}"
            )
            yield literal, name_with_format, at
            at += len(variable or "")
    except ValueError as error:
        raise PMLError(
            f"a template that str.format cannot read ({error})", "{{ and }} for literal braces", name
        ) from error


def _plain(name: str, text: str, lo: int, hi: int) -> str:
    """Return the text lo:hi between variables; raises PMLError if it contains other tags, such as logic."""
    plain = text[lo:hi]
    if logic := re.search(r"{%|{{", plain):
        line = text.count("\n", 0, lo) + plain.count("\n", 0, logic.start()) + 1
        end = plain.find("%}" if logic[0] == "{%" else "}}", logic.end())
        tag = plain[logic.start() : max(end, logic.start()) + 2]
        raise PMLError(f"'{tag[:60]}' in a template", "texts and variables only", name, line, 1)
    return plain
