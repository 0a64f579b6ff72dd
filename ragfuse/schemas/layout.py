"""The token layout of a schema: token positions, runs of tokens that are encoded together (Prompt
Cache 3.3), and the chat template's text around messages.

A run is encoded in one forward pass. It is the text of a module and of the default modules in the
module's unions, or the texts of a scaffold's modules. Other nested modules are separate runs, which
leave gaps in the positions of the outer module's run. The schema's own text is also a run; every
prompt includes it. The modules of a union start at the same position. A union takes as many
positions as its longest module. A parameter takes `len` positions.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from posixpath import join
from typing import Any, cast

from ragfuse.schemas.nodes import (
    NOWHERE,
    Item,
    Module,
    Param,
    Role,
    RoleName,
    Scaffold,
    Schema,
    SourcePosition,
    TextNode,
    Union,
    check_scope,
)
from ragfuse.schemas.pml import one_of
from ragfuse.types.keys import digest

log = logging.getLogger("ragfuse.engine")

Encode = Callable[[str, bool], Sequence[int]]
"""`encode(text, allow_special)` returns the token ids of a text. It adds no BOS or other token."""
MAX_SCHEMA_TOKENS = 4_000_000
"""Maximum total tokens of a schema's modules, scaffolds and parameters."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The chat template's text before and after a message of each role, and the generation prompt
    (`ask`).

    Special tokens are parsed in the template's text only, never in messages. Without a template, a
    message is plain text followed by a newline.
    """

    system: tuple[str, str] = ("", "\n")
    user: tuple[str, str] = ("", "\n")
    assistant: tuple[str, str] = ("", "\n")
    ask: str = ""

    def around(self, role: RoleName) -> tuple[str, str]:
        """Return the text before and after a message of a role."""
        return cast(tuple[str, str], getattr(self, role))


NO_WRAPPING = Wrapping()


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens at consecutive positions from `start` on: text of the module `owner`, or placeholders
    for the module's parameter `param`.
    """

    owner: str
    start: int
    tokens: tuple[int, ...] = field(repr=False)
    param: str = ""

    @property
    def stop(self) -> int:
        """Position after the range's last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ModulePosition:
    """The positions start:stop of a module, and its parts in order.

    Args:
        name: Name of the module.
        path: Path such as `a/b`. "" for the schema's own text.
        start: Position of the module's first token.
        stop: Position after the module's last token.
        parts: The module's texts, parameters and nested modules, in order. Modules of a union
            begin at the same position.
        union: Number of the union that contains the module, from 1. 0 means no union.
        is_default: True if the text around a union is encoded with this module of the union.
        is_cached: True if the module's KV is reused. False if it is computed for each prompt.
        in_message: True if the module is inside a message of the schema.
        at: The module's position in the source.
    """

    name: str
    path: str
    start: int
    stop: int
    parts: tuple[Part, ...] = field(repr=False)
    union: int = 0
    is_default: bool = False
    is_cached: bool = True
    in_message: bool = False
    at: SourcePosition = NOWHERE

    @property
    def ranges(self) -> tuple[TokenRange, ...]:
        """Token ranges of the module's own text and parameters, in order."""
        return tuple(part for part in self.parts if isinstance(part, TokenRange))

    @property
    def places(self) -> tuple[ModulePosition, ...]:
        """The modules nested directly in the module, including the modules of unions."""
        return tuple(part for part in self.parts if isinstance(part, ModulePosition))


Part = TokenRange | ModulePosition


@dataclass(frozen=True, eq=False)
class SchemaRun:
    """Tokens of a module or scaffold that are encoded together in one forward pass.

    Args:
        members: Paths of the modules in the run. A prompt that imports all members can reuse the
            whole run. A module's run lists the module first. That member can be reused alone.
        ranges: The run's token ranges by position, possibly with gaps.
    """

    members: tuple[str, ...]
    ranges: tuple[TokenRange, ...] = field(repr=False)

    @property
    def start(self) -> int:
        """The position of the run's first token in the schema."""
        return self.ranges[0].start

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The run's token ids, by position."""
        return tuple(token for part in self.ranges for token in part.tokens)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position of each token, relative to `start`. The first position is 0."""
        return tuple(at - self.start for each in self.ranges for at in range(each.start, each.stop))

    def layout(self, fixed: bool = False) -> str:
        """Return the `layout` part of the `ChunkKey` under which the run's KV is stored.

        The part is "" if the run's positions have no gaps. Otherwise the part is a digest of the
        positions, so that runs with different gaps have different keys.

        Args:
            fixed: True if the model's KV cannot be moved to other positions. The digest then also
                covers `start`, and the part is "" only if `start` is 0.
        """
        start = self.start if fixed else 0
        if not start and self.positions[-1] == len(self.tokens) - 1:
            return ""
        return digest("layout", struct.pack(f"<{len(self.positions) + 1}i", start, *self.positions))


@dataclass(frozen=True)
class SchemaLayout:
    """The layout of a schema for one tokenizer and chat template.

    Args:
        schema: The schema.
        root: The schema, as one module that contains all other modules.
        wrapping: The chat template's text around messages.
        places: The position of every module, by the module's path.
        modules: The run of each module, by path. Modules that are uncached or very short have none.
        scaffolds: The runs of the schema's scaffolds, largest first.
        fixed: True if the model's KV cannot be moved to other positions.
    """

    schema: Schema
    root: ModulePosition
    wrapping: Wrapping
    places: Mapping[str, ModulePosition] = field(repr=False)
    modules: Mapping[str, SchemaRun] = field(repr=False)
    scaffolds: tuple[SchemaRun, ...] = ()
    fixed: bool = False

    @property
    def runs(self) -> tuple[SchemaRun, ...]:
        """All distinct runs to encode."""
        return (*self.modules.values(), *self.scaffolds)

    @property
    def n_positions(self) -> int:
        """Number of token positions that the schema takes."""
        return self.root.stop


def lay_out(
    schema: Schema,
    encode: Encode,
    placeholder: int,
    wrapping: Wrapping = NO_WRAPPING,
    bos: Sequence[int] = (),
    min_tokens: int = 8,
    fixed: bool = False,
) -> SchemaLayout:
    """Compute the layout of a schema for one tokenizer and chat template.

    Args:
        schema: The schema.
        encode: The tokenizer.
        placeholder: The token id that stands in for arguments not known yet: unk, or a space.
        wrapping: The chat template's text around messages.
        bos: Token ids at the first positions.
        min_tokens: A module with fewer tokens of own text gets no run and is always computed.
        fixed: True if the model's KV cannot be moved to other positions.

    Raises:
        PMLError: The schema contradicts itself or is too large.
    """
    builder = _Builder(encode, wrapping, placeholder)
    root = builder.place(Module("", schema.items, at=schema.at), "", 0, False, tuple(bos))
    places = {place.path: place for place in _walk(root)}
    modules = {
        path: builder.run(tuple(_standing_in(place)), places, place.at)
        for path, place in places.items()
        if place.is_cached
        and sum(len(each.tokens) for each in place.ranges if not each.param) >= max(1, min_tokens)
    }
    scaffolds = [builder.run(_together(each, places), places, each.at) for each in schema.scaffolds]
    return SchemaLayout(
        schema,
        root,
        wrapping,
        places,
        modules,
        tuple(sorted(scaffolds, key=lambda run: -sum(len(each.tokens) for each in run.ranges))),
        fixed,
    )


class _Builder:
    """Assigns positions to every item of a schema."""

    def __init__(self, encode: Encode, wrapping: Wrapping, placeholder: int) -> None:
        self._encode, self._wrapping, self._placeholder = encode, wrapping, placeholder
        self._n_tokens = self._n_unions = 0

    def place(
        self,
        module: Module,
        path: str,
        start: int,
        in_message: bool,
        head: tuple[int, ...] = (),
        union: int = 0,
    ) -> ModulePosition:
        """Lay out a module from position `start` on. The ids `head` precede the module's text."""
        check_scope(module.items)
        parts, text, at = list[Part](), list(head), start
        for item, inside in (*self._flat(module.items, in_message), (None, False)):
            if isinstance(item, tuple):
                text += item
                continue
            if text:
                parts.append(TokenRange(path, at, tuple(text)))
                at, text = parts[-1].stop, []
            if item is not None:
                found = self._parts(item, path, at, inside)
                parts += found
                at = max((part.stop for part in found), default=at)
        return ModulePosition(
            module.name,
            path,
            start,
            at,
            tuple(parts),
            union,
            is_cached=module.cache,
            in_message=in_message,
            at=module.at,
        )

    def run(
        self, paths: tuple[str, ...], places: Mapping[str, ModulePosition], at: SourcePosition
    ) -> SchemaRun:
        """Return the run of these modules' own text. PMLError if the text is empty or too long."""
        ranges = [each for path in paths for each in places[path].ranges]
        if not ranges:
            raise at.error("a scaffold whose modules have no text", "at least one module with text")
        self._count(sum(len(each.tokens) for each in ranges), at)
        return SchemaRun(paths, tuple(sorted(ranges, key=lambda each: each.start)))

    def _count(self, n_tokens: int, at: SourcePosition) -> None:
        self._n_tokens += n_tokens
        if self._n_tokens > MAX_SCHEMA_TOKENS:
            raise at.error(f"{self._n_tokens} tokens in a schema", f"at most {MAX_SCHEMA_TOKENS}")

    def _flat(
        self, items: Sequence[Item], in_message: bool
    ) -> Iterator[tuple[Param | Module | Union | tuple[int, ...], bool]]:
        """Yield pairs: first an item or the token ids of a text, then whether it is in a message.
        White space between messages is left out.
        """
        for i, item in enumerate(items):
            if isinstance(item, Role):
                if in_message:
                    raise item.at.error(
                        f"'<{item.role}>' in another message", "messages side by side, not nested"
                    )
                before, after = self._wrapping.around(item.role)
                yield opened(self._encode, before), True
                yield from self._flat(item.items, True)
                yield tuple(self._encode(after, True)), True
            elif not isinstance(item, TextNode):
                yield item, in_message
            elif item.text.strip() or not any(
                isinstance(each, Role) for each in items[max(0, i - 1) : i + 2]
            ):
                yield tuple(self._encode(item.text, False)), in_message

    def _parts(
        self, item: Param | Module | Union, path: str, at: int, inside: bool
    ) -> Sequence[Part]:
        """Lay out a parameter, a module or all modules of a union from position `at` on."""
        if isinstance(item, Param):
            return [TokenRange(path, at, self._stand_in(item), item.name)]
        if isinstance(item, Module):
            return [self.place(item, join(path, item.name), at, inside)]
        names = [module.name for module in item.modules]
        if item.scaffold and item.scaffold not in names:
            message = "Line %d: scaffold '%s' is not a module of its union; wanted %s"
            log.warning(message, item.at.line, item.scaffold, one_of(item.scaffold, names))
        self._n_unions += 1
        number = self._n_unions
        places = (
            self.place(each, join(path, each.name), at, inside, (), number) for each in item.modules
        )
        return [replace(place, is_default=place.name == item.scaffold) for place in places]

    def _stand_in(self, param: Param) -> tuple[int, ...]:
        """Return ids that stand in for a parameter's argument: scaffold text, then placeholders."""
        if param.length < 1 or param.name == "schema":
            raise param.at.error(
                f"parameter '{param.name}' of {param.length} tokens",
                "at least 1 token ('schema' cannot be a parameter's name)",
            )
        self._count(param.length, param.at)
        tokens = tuple(self._encode(param.scaffold, False)) if param.scaffold else ()
        if len(tokens) > param.length:
            message = (
                "Line %d: the scaffold of parameter '%s' has %d tokens and is cut to its len, %d"
            )
            log.warning(message, param.at.line, param.name, len(tokens), param.length)
        return tokens[: param.length] + (self._placeholder,) * (param.length - len(tokens))


def opened(encode: Encode, before: str) -> tuple[int, ...]:
    """Encode the template text `before`, plus a space if the tokenizer adds one after the text."""
    ids, letter = tuple(encode(before, True)), "a"
    together, space = tuple(encode(before + letter, True)), tuple(encode(" ", False))
    is_put = together != (*ids, *encode(letter, False)) and together == (
        *ids,
        *encode(f" {letter}", False),
    )
    return (*ids, *space) if is_put else ids


def _walk(place: ModulePosition) -> Iterator[ModulePosition]:
    yield place
    for each in place.places:
        yield from _walk(each)


def _standing_in(place: ModulePosition) -> Iterator[str]:
    """Yield a module's path, then the paths of default modules in nested unions, recursively."""
    yield place.path
    for each in place.places:
        if each.is_default:
            yield from _standing_in(each)


def _together(scaffold: Scaffold, places: Mapping[str, ModulePosition]) -> tuple[str, ...]:
    """Return a scaffold's module paths. PMLError if no prompt can import all these modules."""
    paths = tuple(dict.fromkeys("" if path == "." else path for path in scaffold.modules))
    for path in paths:
        if path not in places or not places[path].is_cached:
            cached = (each for each, place in places.items() if place.is_cached)
            raise scaffold.at.error(f"'{path}', not a cached module", one_of(path, cached))
    check_together(dict.fromkeys(paths, scaffold.at), places)
    return paths


def check_together(
    named: Mapping[str, SourcePosition], places: Mapping[str, ModulePosition]
) -> None:
    """Check that modules can be imported together.

    Args:
        named: Source position of each module, by the module's path.
        places: Every module of the schema by its path.

    Raises:
        PMLError: A nested module is named without its outer module, or two modules belong to one
            union.
    """
    for path, at in named.items():
        parent = path.rpartition("/")[0]
        if parent and parent not in named:
            raise at.error(f"'{path}' without '{parent}', which contains '{path}'", "both modules")
    taken = dict[int, str]()
    for path, at in named.items():
        union = places[path].union
        if union and (other := taken.setdefault(union, path)) != path:
            raise at.error(f"'{other}' and '{path}' of the same union", "only one of them")


def outline(layout: SchemaLayout, nbytes_per_token: int) -> list[dict[str, Any]]:
    """Return one dict of JSON types per module. A module comes before its nested modules.

    The keys are "module" (path, or "." for the schema's own text), "start" and "stop" (positions),
    "tokens" (of own text and parameters), "parameters" (maximum tokens of each), and "nbytes" (of
    the module's KV).
    """
    return [
        {
            "module": path or ".",
            "start": place.start,
            "stop": place.stop,
            "tokens": sum(len(each.tokens) for each in place.ranges),
            "parameters": {each.param: len(each.tokens) for each in place.ranges if each.param},
            "nbytes": len(run.tokens) * nbytes_per_token
            if (run := layout.modules.get(path)) is not None
            else 0,
        }
        for path, place in layout.places.items()
    ]


RenderMessages = Callable[[list[dict[str, str]], bool], str]
"""Renders messages; adds the generation prompt if the second argument is True. May raise."""


def wrapping_of(render: RenderMessages, bos: str) -> tuple[str, Wrapping]:
    """Return the chat template's text before all messages, and the text around each message.

    If the template cannot render the probe messages, return "" and `NO_WRAPPING`.
    """
    try:
        return _probed(render, bos)
    except Exception:  # a template may raise anything
        return "", NO_WRAPPING


def _probed(render: RenderMessages, bos: str) -> tuple[str, Wrapping]:
    head, after = _between(render, ["user"])
    with_prompt = _between(render, ["user"], ask=True)[1]
    _, to_answer, to_user, _, end = _between(render, ["user", "assistant", "user", "assistant"])
    ask = with_prompt.removeprefix(after) if with_prompt.startswith(after) else with_prompt
    if not to_answer.startswith(after):
        after = to_answer.removesuffix(ask)
    if end and to_user.startswith(end):
        before_user = to_user[len(end) :]
    else:  # the longest common ending of `head` and `to_user`
        ends = (head[at:] for at in range(len(head) + 1))
        before_user = next(each for each in ends if to_user.endswith(each))
    assistant = to_answer.removeprefix(after), to_user.removesuffix(before_user)
    try:
        first, behind, _ = _between(render, ["system", "user"])
    except Exception:  # the template rejects system messages, which are then wrapped like a user's
        first, behind = head, after + before_user
    prefix = bos if bos and first.startswith(bos) and not before_user.startswith(bos) else ""
    system = first.removeprefix(prefix), behind.removesuffix(before_user)
    return prefix, Wrapping(system, (before_user, after), assistant, ask)


def _between(render: RenderMessages, roles: Sequence[str], ask: bool = False) -> list[str]:
    """Return the texts before, between and after messages of these roles.

    Raises:
        ValueError: A message is missing in the rendered text.
    """
    marks = [f"probed-{at}-{role}" for at, role in enumerate(roles)]
    text = render(
        [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)], ask
    )
    found = []
    for mark in marks:
        at = text.index(mark)
        found.append(text[:at])
        text = text[at + len(mark) :]
    return [*found, text]
