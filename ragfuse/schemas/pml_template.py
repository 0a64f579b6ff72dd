"""Prompts in PML with variables, for programs that fill one template for every question.

Schema and prompt are read before anything is filled in, so that what a variable holds is text, whatever it looks like:
it is never read as PML.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ragfuse.errors import InputError
from ragfuse.schemas.frontends.python import schema_of
from ragfuse.schemas.frontends.templates import Syntax, filled, from_template, parsed
from ragfuse.schemas.nodes import Import, MessageNode, Param, PMLPrompt, Schema, SourcePosition, TextNode, inner
from ragfuse.schemas.pml import is_name, parse_prompt, parse_schema, read, to_pml
from ragfuse.schemas.pml_writer import NO_TEXT
from ragfuse.types.keys import digest

Change = Callable[[str, SourcePosition], str]
"""(text, where it stands) -> what stands there instead."""


class FilledTemplate(str):
    """What a template was filled to: as a text it is PML, for people; `request` is what an engine answers.

    schema: that it is a prompt over, to be registered. progress: whatever whoever hands it on wants to find here.
    """

    request: PMLPrompt
    schema: Schema
    progress: Any
    _whose: str

    def __new__(cls, request: PMLPrompt, schema: Schema, progress: Any = None, whose: str = "") -> FilledTemplate:
        """Prompts of which anything differs are different texts; whose: a digest that stands for the schema."""
        shown, whose = _each(request, lambda text, at: NO_TEXT.sub("\ufffd", text)), whose or digest(repr(schema))
        made = super().__new__(cls, f"{to_pml(shown)}<!-- {digest(whose, repr(request))} -->")
        made.request, made.schema, made.progress, made._whose = replace(request, over=schema), schema, progress, whose
        return made

    def asking(self, text: str) -> FilledTemplate:
        """The same with one more message of a user's at its end."""
        return FilledTemplate(self.request.asking(text), self.schema, self.progress, self._whose)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.request, self.schema, self.progress, self._whose


class PMLTemplate:
    """A prompt in PML with variables in its texts, messages and arguments, over a schema; `fill` fills it.

    schema: its PML, a file, what was read, or a prompt function. prompt: PML, a file, or what was read, with
    `{variable}` wherever text stands (syntax "mustache" or "jinja2": `{{ variable }}`); None: the prompt function's
    parameters are the variables, or the schema's own. question: the text of one more message of a user's, with
    variables too. PMLError with the place for what cannot be read.
    """

    Filled: ClassVar[type[FilledTemplate]] = FilledTemplate

    def __init__(
        self,
        schema: Schema | Path | str | Callable[..., Any],
        prompt: PMLPrompt | Path | str | None = None,
        question: str = "",
        syntax: Syntax = "f-string",
    ) -> None:
        self.schema, self._whose = _schema(schema), ""
        self._syntax, self._question = syntax, question
        self._function = schema if callable(schema) and prompt is None else None
        self._request = None if prompt is None else _prompt(prompt)
        if self._request is not None and self._request.schema != self.schema.name:
            raise self._request.at.error(f"a prompt for schema '{self._request.schema}'", f"'{self.schema.name}'")
        self._parts: dict[str, list[tuple[str, str | None]]] = {}
        self._own = self._own_variables()
        asked = self._variables(PMLPrompt("", (MessageNode("user", question),)))
        self.variables = tuple(dict.fromkeys((*self._own, *asked)))
        self.optional = tuple(name for name, has_default in self._own.items() if has_default)
        self._whose = digest(repr(self.schema))

    @classmethod
    def of(
        cls,
        name: str,
        template: Any,
        max_tokens: int | Mapping[str, int],
        question: str = "",
        syntax: Syntax = "f-string",
    ) -> PMLTemplate:
        """That of a template of LangChain's or LlamaIndex's, of a text, or of (role, text) pairs.

        max_tokens: room for every variable, or for each. PMLError for what no schema can hold.
        """
        return cls(from_template(name, template, max_tokens, syntax), None, question, syntax)

    @staticmethod
    def alone(others: int) -> InputError:
        """What is said where so many other messages stand beside a prompt in PML."""
        return InputError(
            f"A prompt in PML came with {others} other messages; wanted it alone. Put what else is said, system "
            "prompts too, into its template: messages of its schema or of its prompt, or `question`."
        )

    @classmethod
    def only(cls, found: Sequence[FilledTemplate | None]) -> FilledTemplate | None:
        """The prompt in PML that messages are, None where none is one; InputError where others stand beside it."""
        mine = [each for each in found if each]
        if mine and len(found) > 1:
            raise cls.alone(len(found) - 1)
        return mine[0] if mine else None

    def fill(self, values: Mapping[str, object], progress: Any = None) -> FilledTemplate:
        """The prompt with these values, as their `str`; others are left out. InputError where one is missing."""
        wanted = [name for name in self.variables if name not in self.optional]
        for name in wanted:
            if name not in values:
                found = ", ".join(map(str, values)) or "none"
                raise InputError(f"Wanted the variables {', '.join(wanted)}, found {found}; give '{name}'.")
        request = self._made(values)
        if self._question:
            request = request.asking(self._text(self._question, values, request.at))
        return FilledTemplate(request, self.schema, progress, self._whose)

    def __repr__(self) -> str:
        return f"PMLTemplate(schema '{self.schema.name}', variables {', '.join(self.variables) or 'none'})"

    # inside

    def _made(self, values: Mapping[str, object]) -> PMLPrompt:
        own = {name: values[name] for name in self._own if name in values}
        if self._function is not None:
            return _prompt(self._function(**own))
        if self._request is None:
            return filled(self.schema, own)
        return _each(self._request, lambda text, at: self._text(text, values, at))

    def _own_variables(self) -> dict[str, bool]:
        """Those of the prompt without its question, and whether each has a default."""
        if self._function is not None:
            given = inspect.signature(self._function).parameters.values()
            return {each.name: each.default is not each.empty for each in given}
        if self._request is not None:
            return dict.fromkeys(self._variables(self._request), False)
        return {item.name: False for item in inner(self.schema.items) if isinstance(item, Param)}

    def _variables(self, request: PMLPrompt) -> list[str]:
        found: list[str] = []

        def note(text: str, at: SourcePosition) -> str:
            found.extend(name for _, name in self._split(text, at) if name is not None)
            return text

        _each(request, note)
        return found

    def _text(self, text: str, values: Mapping[str, object], at: SourcePosition) -> str:
        parts = self._split(text, at)
        return "".join(literal if name is None else f"{literal}{values[name]}" for literal, name in parts)

    def _split(self, text: str, at: SourcePosition) -> list[tuple[str, str | None]]:
        """(text, variable behind it or None), made once."""
        if text not in self._parts:
            parts = [(literal, name) for literal, name, _ in parsed(at.file or "the prompt", text, self._syntax)]
            for _, name in parts:
                if name is not None and not is_name(name):
                    raise at.error(f"'{name}' in a template", "the name of a variable, without logic or format")
            self._parts[text] = parts
        return self._parts[text]


def _schema(given: Schema | Path | str | Callable[..., Any]) -> Schema:
    if isinstance(given, Schema):
        return given
    if isinstance(given, str) and given.lstrip().startswith("<"):
        return parse_schema(given)
    if not isinstance(given, str | Path):
        return schema_of(given)
    found = read(given)
    if not isinstance(found, Schema):
        raise found.at.error("<prompt>", "<schema>")
    return found


def _prompt(given: Any) -> PMLPrompt:
    if isinstance(given, PMLPrompt):
        return given
    if isinstance(given, str) and given.lstrip().startswith("<"):
        return parse_prompt(given)
    found = read(given)
    if not isinstance(found, PMLPrompt):
        raise found.at.error("<schema>", "<prompt>")
    return found


def _each(request: PMLPrompt, change: Change) -> PMLPrompt:
    """The same with every text changed: of its own, of messages, of arguments."""
    args, items = _args(request.args, request.at, change), _items(request.items, change)
    return replace(request, args=args, items=items, ending=change(request.ending, request.at))


def _items(
    items: tuple[TextNode | Import | MessageNode, ...], change: Change
) -> tuple[TextNode | Import | MessageNode, ...]:
    return tuple(
        replace(item, args=_args(item.args, item.at, change), items=_items(item.items, change))
        if isinstance(item, Import)
        else replace(item, text=change(item.text, item.at))
        for item in items
    )


def _args(args: tuple[tuple[str, str], ...], at: SourcePosition, change: Change) -> tuple[tuple[str, str], ...]:
    return tuple((name, change(value, at)) for name, value in args)
