"""What PML says, as frozen values: schemas with their modules, and the prompts that import them (Prompt Cache 3.2).

`pml` reads these from text and writes them; `programs` and `templates` make them from Python. `at` says where a thing
stands, for errors, and does not count when two are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from ragfuse.errors import PMLError

RoleName = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A place in a file: line and column count from 1, 0 where there is none."""

    file: str = ""
    line: int = 0
    column: int = 0

    def error(self, found: str, wanted: str) -> PMLError:
        """An error that stands here."""
        return PMLError(found, wanted, self.file, self.line, self.column)


NOWHERE = SourcePosition()


@dataclass(frozen=True, slots=True)
class TextNode:
    """Text as it is, white space included."""

    text: str
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Param:
    """Room for an argument of at most `length` tokens; `scaffold` stands in it while its module is encoded."""

    name: str
    length: int
    scaffold: str = ""
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Module:
    """Text that is encoded once and imported by name; modules in it are imported in it. Not `cache`: always fresh."""

    name: str
    items: tuple[Item, ...] = ()
    cache: bool = True
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt imports one at most; `scaffold` stands in while the text around is encoded."""

    modules: tuple[Module, ...] = ()
    scaffold: str = ""
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Role:
    """A message, to be wrapped as the model's chat template does."""

    role: RoleName
    items: tuple[Item, ...] = ()
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


Item = TextNode | Param | Module | Union | Role


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Modules, by their paths (`a/b`; `.`: the schema's own text), that are encoded once more, together."""

    modules: tuple[str, ...]
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Schema:
    """A whole schema: its items in order, the text between modules being a module that is always imported."""

    name: str
    items: tuple[Item, ...] = ()
    scaffolds: tuple[Scaffold, ...] = ()
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a prompt imports, (parameter, argument) by (parameter, argument); in it what is imported in it."""

    name: str
    args: tuple[tuple[str, str], ...] = ()
    items: tuple[TextNode | Import | MessageNode, ...] = ()
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class MessageNode:
    """A message of a prompt's own, behind or between what it imports."""

    role: RoleName
    text: str = ""
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PMLPrompt:
    """A prompt that is derived from a schema: what it imports and what it adds, arguments of the schema's own.

    ending: text behind everything, which no message holds, for the model to go on from.
    over: the very schema that is meant, whichever of its name is registered by now; None: that one.
    """

    schema: str
    items: tuple[TextNode | Import | MessageNode, ...] = ()
    args: tuple[tuple[str, str], ...] = ()
    at: SourcePosition = field(default=NOWHERE, compare=False, repr=False)
    ending: str = ""
    over: Schema | None = field(default=None, compare=False, repr=False)

    def asking(self, text: str, role: RoleName = "user") -> PMLPrompt:
        """The same with one more message at its end."""
        return replace(self, items=(*self.items, MessageNode(role, text)))

    def going_on(self, text: str) -> PMLPrompt:
        """The same with this text behind everything."""
        return replace(self, ending=self.ending + text)


def inner(items: tuple[Item, ...]) -> Iterator[Item]:
    """What stands in one scope: through messages and unions, not into modules."""
    for item in items:
        yield item
        if isinstance(item, Role):
            yield from inner(item.items)
        elif isinstance(item, Union):
            yield from item.modules


def joined(items: Iterable[Item]) -> tuple[Item, ...]:
    """Neighbouring texts as one, as they are read."""
    found: list[Item] = []
    for _, group in groupby(items, lambda item: isinstance(item, TextNode)):
        alike = list(group)
        texts = [item for item in alike if isinstance(item, TextNode)]
        found += [TextNode("".join(each.text for each in texts), texts[0].at)] if texts else alike
    return tuple(found)


def check_scope(items: tuple[Item, ...]) -> None:
    """PMLError where two modules of one scope share a name, or a parameter's rooms differ (Prompt Cache 3.2.1)."""
    modules: dict[str, Module] = {}
    params: dict[str, Param] = {}
    for item in inner(items):
        if isinstance(item, Module):
            first = modules.setdefault(item.name, item)
            if first is not item:
                raise item.at.error(f"a second module '{item.name}'", f"one of that name beside line {first.at.line}'s")
        elif isinstance(item, Param) and params.setdefault(item.name, item).length != item.length:
            first_at = params[item.name]
            raise item.at.error(
                f"parameter '{item.name}' with len {item.length}",
                f"{first_at.length} as in line {first_at.at.line}, or another name",
            )
