"""The syntax tree of PML: schemas, and prompts that import a schema's modules (Prompt Cache 3.2).

`schemas/pml.py` parses nodes from text. `schemas/frontends` builds nodes from Python. The field
`at` is a node's source position, for error messages. Comparisons of nodes ignore `at`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, TypeVar

from ragfuse.errors import PMLError

Joined = TypeVar("Joined")
RoleName = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A position in a source file. Lines and columns begin at 1. 0 means unknown."""

    file: str = ""
    line: int = 0
    column: int = 0

    def error(self, found: str, wanted: str, advice: str = "") -> PMLError:
        """Return a PMLError at this position: what was found, what was wanted, and advice."""
        return PMLError(found, wanted, self.file, self.line, self.column, advice)


NOWHERE = SourcePosition()


@dataclass(frozen=True, slots=True, kw_only=True)
class PMLNode:
    """A node of the tree, with its position in the source."""

    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TextNode(PMLNode):
    """Literal text, including white space."""

    text: str


@dataclass(frozen=True, slots=True)
class Param(PMLNode):
    """A parameter of up to `length` tokens. During encoding, its argument is `scaffold`."""

    name: str
    length: int
    scaffold: str = ""


@dataclass(frozen=True, slots=True)
class Module(PMLNode):
    """A prompt module: text that is encoded once and imported by name.

    A nested module is imported inside the import of the outer module. If `cache` is False, the
    module's text is always computed.
    """

    name: str
    items: tuple[Item, ...] = ()
    cache: bool = True


@dataclass(frozen=True, slots=True)
class Union(PMLNode):
    """Alternative modules, of which a prompt imports at most one.

    `scaffold` is the name of the module with which the text around the union is encoded, or "".
    """

    modules: tuple[Module, ...] = ()
    scaffold: str = ""


@dataclass(frozen=True, slots=True)
class Role(PMLNode):
    """A message, wrapped by the model's chat template. Messages of a `PMLPrompt` have only text."""

    role: RoleName
    items: tuple[Item, ...] = ()


Item = TextNode | Param | Module | Union | Role


@dataclass(frozen=True, slots=True)
class Scaffold(PMLNode):
    """Modules that are also encoded together, so that they attend to each other (Prompt Cache 3.3).

    Modules are named by path, such as `a/b`. The path `.` is the schema's own text.
    """

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schema(PMLNode):
    """A schema: its items in order. Every prompt over it includes the text outside modules."""

    name: str
    items: tuple[Item, ...] = ()
    scaffolds: tuple[Scaffold, ...] = ()


@dataclass(frozen=True, slots=True)
class Import(PMLNode):
    """An import of a module by a prompt.

    Args:
        name: Name of the module.
        args: (parameter, argument) pairs.
        items: Imports of nested modules, and the prompt's own texts between the imports.
    """

    name: str
    args: tuple[tuple[str, str], ...] = ()
    items: tuple[PromptItem, ...] = ()


PromptItem = TextNode | Import | Role


@dataclass(frozen=True, slots=True)
class PMLPrompt(PMLNode):
    """A prompt over a schema: imported modules and added text.

    Args:
        schema: Name of the schema.
        items: Imports, texts and messages, in order.
        args: Arguments of the schema's own parameters.
        over: The schema to use in place of the registered one. None means the registered schema.
    """

    schema: str
    items: tuple[PromptItem, ...] = ()
    args: tuple[tuple[str, str], ...] = ()
    over: Schema | None = field(default=None, compare=False, repr=False)

    def asking(self, text: str, role: RoleName = "user") -> PMLPrompt:
        """Return a copy with one more message at the end."""
        return replace(self, items=(*self.items, Role(role, (TextNode(text),))))


def inner(items: tuple[Item, ...]) -> Iterator[Item]:
    """Yield a scope's items, including items in messages and unions, but not in nested modules."""
    for item in items:
        yield item
        if isinstance(item, Role):
            yield from inner(item.items)
        elif isinstance(item, Union):
            yield from item.modules


def has_messages(items: tuple[Item, ...]) -> bool:
    """Return whether the items contain a message, directly or inside a module."""
    scope = list(inner(items))
    deeper = (has_messages(each.items) for each in scope if isinstance(each, Module))
    return any(isinstance(each, Role) for each in scope) or any(deeper)


def joined(items: Iterable[Joined]) -> tuple[Joined, ...]:
    """Merge adjacent text nodes."""
    found: list[Any] = []
    for is_text, group in groupby(items, lambda item: isinstance(item, TextNode)):
        alike: list[Any] = list(group)
        found += (
            [TextNode("".join(each.text for each in alike), at=alike[0].at)] if is_text else alike
        )
    return tuple(found)


def check_scope(items: tuple[Item, ...]) -> None:
    """Check that module names are unique in a scope, and that a parameter has only one length.

    Raises:
        PMLError: Two modules share a name, or a parameter has two lengths.
    """
    modules: dict[str, Module] = {}
    params: dict[str, Param] = {}
    for item in inner(items):
        if isinstance(item, Module) and (first := modules.setdefault(item.name, item)) is not item:
            raise item.at.error(
                f"a second module '{item.name}'",
                f"a new name, because line {first.at.line} has a module of this name",
            )
        if isinstance(item, Param) and params.setdefault(item.name, item).length != item.length:
            raise item.at.error(
                f"parameter '{item.name}' with len {item.length}",
                f"len {params[item.name].length}, as for the earlier parameter '{item.name}'",
            )
