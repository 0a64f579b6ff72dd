"""PML prompts with variables. A variable's value is always text and never parsed as PML."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar

from ragfuse.errors import InputError
from ragfuse.schemas.frontends.python import schema_of
from ragfuse.schemas.nodes import (
    Param,
    PMLPrompt,
    Role,
    Schema,
    SourcePosition,
    TextNode,
    inner,
)
from ragfuse.schemas.pml import is_name, read_prompt, read_schema, to_pml
from ragfuse.types.arguments import checks_arguments
from ragfuse.types.keys import digest

Change = Callable[[str, SourcePosition], str]
"""Returns the replacement of a text. The second argument is the text's source position."""


class FilledTemplate(str):
    """A `PMLTemplate` filled with values. As a str, it is readable PML.

    Attributes:
        request: The parsed prompt with the values, to pass to an engine.
        schema: The schema of the prompt. Register the schema with the engine first.
    """

    request: PMLPrompt
    schema: Schema

    def __new__(cls, request: PMLPrompt, schema: Schema) -> FilledTemplate:
        """Create the str, which is different for each combination of prompt and schema."""
        template = super().__new__(
            cls, f"{to_pml(request)}<!-- {digest(repr(schema), repr(request))} -->"
        )
        template.request, template.schema = replace(request, over=schema), schema
        return template

    def asking(self, text: str) -> FilledTemplate:
        """Return the prompt with another user message at the end."""
        return FilledTemplate(self.request.asking(text), self.schema)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.request, self.schema


@checks_arguments
class PMLTemplate:
    """A PML prompt over a schema, with variables in its texts, messages and arguments.

    Args:
        schema: PML text, the path of a PML file, a parsed schema, or a prompt function.
        prompt: PML text, the path of a PML file, or a parsed prompt. Texts and arguments may
            contain `{variable}`. A literal brace is written twice. If `prompt` is None, the
            variables are the parameters of the prompt function or of the schema.
        question: Text of a user message that is added at the end. The text may have variables.

    Raises:
        PMLError: Schema or prompt cannot be parsed. The error names the source position.
    """

    Filled: ClassVar[type[FilledTemplate]] = FilledTemplate

    def __init__(
        self,
        schema: Schema | Path | str | Callable[..., Any],
        prompt: PMLPrompt | Path | str | None = None,
        question: str = "",
    ) -> None:
        self._function = schema if callable(schema) else None
        if isinstance(schema, str | Path):
            schema = read_schema(schema)
        self.schema = schema if isinstance(schema, Schema) else schema_of(schema)
        defaults = dict[str, bool]()
        if prompt is not None:
            self._function = None
            request = prompt if isinstance(prompt, PMLPrompt) else read_prompt(prompt)
            if request.schema != self.schema.name:
                raise request.at.error(
                    f"a prompt for schema '{request.schema}'", f"one for '{self.schema.name}'"
                )
        elif self._function is not None:
            request = PMLPrompt(self.schema.name)
            parameters = inspect.signature(self._function).parameters.values()
            defaults = {each.name: each.default is not each.empty for each in parameters}
        else:
            names = dict.fromkeys(
                item.name for item in inner(self.schema.items) if isinstance(item, Param)
            )
            arguments = tuple((name, f"{{{name}}}") for name in names)
            request = PMLPrompt(self.schema.name, (), arguments)
        self._request = request.asking(question) if question else request
        self.variables = tuple(dict.fromkeys((*defaults, *self._variables())))
        self.optional = tuple(name for name, has_default in defaults.items() if has_default)

    @staticmethod
    def alone(others: int) -> InputError:
        """Return the error for a PML prompt that is not the only message."""
        return InputError(
            f"A prompt in PML must be the only message; found {others} more. Move the text"
            " of the other messages into the template, the schema or `question`."
        )

    @classmethod
    def only(cls, found: Sequence[FilledTemplate | None]) -> FilledTemplate | None:
        """Return the PML prompt among messages, or None.

        Args:
            found: One item per message: the message's PML prompt, or None if the message has none.

        Raises:
            InputError: There are other messages besides the PML prompt.
        """
        templates = [each for each in found if each]
        if templates and len(found) > 1:
            raise cls.alone(len(found) - 1)
        return templates[0] if templates else None

    def fill(self, values: Mapping[str, object]) -> FilledTemplate:
        """Return the prompt in which each variable is replaced by `str(value)`.

        Args:
            values: Value of each variable, by name. Other names are ignored.

        Raises:
            InputError: A required variable has no value.
        """
        wanted = [name for name in self.variables if name not in self.optional]
        for name in wanted:
            if name not in values:
                found = ", ".join(map(str, values)) or "none"
                raise InputError(
                    f"The variable '{name}' is missing. Pass {', '.join(wanted)}; found {found}."
                )
        request: PMLPrompt = _changed(self._request, lambda text, at: _filled(text, values, at))
        if self._function is not None:
            names = inspect.signature(self._function).parameters
            made: PMLPrompt = self._function(
                **{name: values[name] for name in names if name in values}
            )
            request = replace(made, items=(*made.items, *request.items))
        return FilledTemplate(request, self.schema)

    def __repr__(self) -> str:
        return (
            f"PMLTemplate(schema '{self.schema.name}', variables"
            f" {', '.join(self.variables) or 'none'})"
        )

    # internal

    def _variables(self) -> list[str]:
        found: list[str] = []

        def collect(text: str, at: SourcePosition) -> str:
            found.extend(name for _, name in _parts(text, at) if name is not None)
            return text

        _changed(self._request, collect)
        return found


def _filled(text: str, values: Mapping[str, object], at: SourcePosition) -> str:
    return "".join(
        literal if name is None else f"{literal}{values[name]}"
        for literal, name in _parts(text, at)
    )


def _parts(text: str, at: SourcePosition) -> list[tuple[str, str | None]]:
    """Return the parts of a text as pairs: literal text, and the variable that follows or None."""
    try:
        found = list(Formatter().parse(text))
    except ValueError as error:
        message = f"a template that str.format cannot read ({error})"
        raise at.error(message, "{{ and }} for literal braces") from error
    for _, name, spec, conversion in found:
        if name is not None and (spec or conversion or not is_name(name)):
            raise at.error(
                f"variable '{name}:{conversion or spec}'", "a plain name, or {{ }} for braces"
            )
    return [(literal, name) for literal, name, _, _ in found]


def _changed(node: Any, change: Change) -> Any:
    """Return a prompt or item with `change` applied to its texts and arguments."""
    if isinstance(node, TextNode):
        return replace(node, text=change(node.text, node.at))
    if not isinstance(node, Role):
        args = tuple((name, change(value, node.at)) for name, value in node.args)
        node = replace(node, args=args)
    return replace(node, items=tuple(_changed(each, change) for each in node.items))
