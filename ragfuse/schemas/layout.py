"""Where every token of a schema stands, and which of them are encoded together (Prompt Cache 3.3).

A module's own text is one run: its tokens at their positions, with gaps where modules and unions stand in it, whose
tokens are runs of their own. So is the schema's own text, which is always imported. A union's modules begin at one
position and take the room of the longest; a parameter takes `len` positions. What a prompt takes from here is said in
`bind`; nothing here knows a model, and what is encoded is encoded by others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType

import torch

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
from ragfuse.schemas.pml import MAX_PML_CHARS, one_of
from ragfuse.types.keys import digest

Encode = Callable[[str, bool], Sequence[int]]
"""`encode(text, allow_special)` gives ids and adds none of its own."""
MAX_SCHEMA_TOKENS = 4_000_000
"""Of all that is encoded of a schema, together."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What a model's chat template writes before and after a message of each role, and `ask` to make it answer.

    Special tokens count as such here, and nowhere in texts. Without a template a message is a text and a line's end.
    """

    system: tuple[str, str] = ("", "\n")
    user: tuple[str, str] = ("", "\n")
    assistant: tuple[str, str] = ("", "\n")
    ask: str = ""

    def around(self, role: RoleName) -> tuple[str, str]:
        """Before and after a message."""
        return {"system": self.system, "user": self.user, "assistant": self.assistant}[role]


NO_WRAPPING = Wrapping()


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens at consecutive positions from `start`: a module's own text, or what stands in for a parameter."""

    owner: str
    start: int
    tokens: tuple[int, ...] = field(repr=False)
    param: str = ""

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ModulePosition:
    """A module's positions, start:stop, and what stands in them in order. `path` is `a/b`; the schema's own is ""."""

    name: str
    path: str
    start: int
    stop: int
    parts: tuple[Part, ...] = field(repr=False)
    is_cached: bool = True
    in_message: bool = False
    at: SourcePosition = NOWHERE

    @property
    def own(self) -> tuple[TokenRange, ...]:
        """Its own text and parameters, in order."""
        return tuple(part for part in self.parts if isinstance(part, TokenRange))

    def places(self) -> Iterator[ModulePosition]:
        """The modules right in it."""
        for part in self.parts:
            if isinstance(part, ModulePosition):
                yield part
            elif isinstance(part, UnionPosition):
                yield from part.places


@dataclass(frozen=True, slots=True)
class UnionPosition:
    """A union's positions, start:stop. `default` is the path of the one that stands in for all, "": none does."""

    start: int
    stop: int
    places: tuple[ModulePosition, ...]
    default: str = ""


Part = TokenRange | ModulePosition | UnionPosition


@dataclass(frozen=True, eq=False)
class SchemaRun:
    """Tokens that are encoded in one go, so that they attend to each other: one module's own, or a scaffold's.

    members: paths of those that may be taken from it, once all are imported; the first may always be. stretches: in
    order of positions, which have gaps.
    """

    members: tuple[str, ...]
    stretches: tuple[TokenRange, ...] = field(repr=False)

    @property
    def start(self) -> int:
        """Position of its first token in the schema: where its own position 0 stands."""
        return self.stretches[0].start

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """All n ids."""
        return tuple(token for stretch in self.stretches for token in stretch.tokens)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Its own n positions, which begin at 0: what it is encoded at."""
        return tuple(at - self.start for each in self.stretches for at in range(each.start, each.stop))

    @cached_property
    def rows(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        """Rows lo:hi of each stretch among its tokens, by owner and start."""
        stops = tuple(accumulate(len(each.tokens) for each in self.stretches))
        spans = zip(self.stretches, stops, strict=True)
        return {(each.owner, each.start): (stop - len(each.tokens), stop) for each, stop in spans}

    def layout(self, fixed: bool = False) -> str:
        """`ChunkKey.layout`: "" for positions 0..n-1, else their digest; of where they stand too if `fixed`."""
        start = self.start if fixed else 0
        if not start and self.positions[-1] == len(self.tokens) - 1:
            return ""
        data = torch.tensor((start, *self.positions), dtype=torch.int32).numpy().astype("<i4").tobytes()
        return digest("layout", data)


@dataclass(frozen=True)
class SchemaLayout:
    """A schema for one tokenizer and template: places by path, the union that each stands in, and what is encoded.

    modules: the run of each module that has one; those not cached and those with few tokens have none. scaffolds:
    the schema's own, largest first. notes: what was found odd, for people. fixed: the model's KV cannot be moved.
    """

    schema: Schema
    root: ModulePosition
    wrapping: Wrapping
    places: Mapping[str, ModulePosition] = field(repr=False)
    forks: Mapping[str, UnionPosition] = field(repr=False)
    modules: Mapping[str, SchemaRun] = field(repr=False)
    scaffolds: tuple[SchemaRun, ...] = ()
    has_messages: bool = False
    notes: tuple[str, ...] = ()
    fixed: bool = False

    @property
    def runs(self) -> tuple[SchemaRun, ...]:
        """All that is to be encoded, each once."""
        return (*self.modules.values(), *self.scaffolds)

    @property
    def n_positions(self) -> int:
        """Positions that the schema takes."""
        return self.root.stop

    def outline(self) -> Iterator[tuple[int, str, ModulePosition | UnionPosition | TokenRange]]:
        """Everything with a place, for people, in order: depth, what it is (`module`, `union`, `param`, `text`), it."""
        yield from _outline(self.root, 0)


def lay_out(
    schema: Schema,
    encode: Encode,
    placeholder: int,
    wrapping: Wrapping = NO_WRAPPING,
    bos: Sequence[int] = (),
    min_tokens: int = 8,
    fixed: bool = False,
) -> SchemaLayout:
    """The layout of a schema for one tokenizer; PMLError where it says what cannot be.

    placeholder: the id that stands in for arguments (unk, or a space). bos: ids at position 0. Modules with less than
    `min_tokens` of own text have no run. fixed: the model's KV stays where it was encoded.
    """
    builder = _Builder(encode, wrapping, placeholder)
    root = builder.place(Module("", schema.items, at=schema.at), "", 0, False, tuple(bos))
    places = {place.path: place for place in _walk(root)}
    own = {path: place.own for path, place in places.items()}
    modules = {
        path: builder.run(tuple(_standing_in(place, places)), own, place.at)
        for path, place in places.items()
        if _is_worth(place, min_tokens)
    }
    named = [(_together(scaffold, places, builder.forks, schema.name), scaffold.at) for scaffold in schema.scaffolds]
    once = {frozenset(paths): (paths, at) for paths, at in named}
    scaffolds = [builder.run(paths, own, at) for paths, at in once.values()]
    return SchemaLayout(
        schema,
        root,
        wrapping,
        MappingProxyType(places),
        MappingProxyType(builder.forks),
        MappingProxyType(modules),
        tuple(sorted(scaffolds, key=lambda run: -sum(len(each.tokens) for each in run.stretches))),
        builder.has_messages,
        tuple(builder.notes),
        fixed,
    )


class _Builder:
    """Gives every item its positions."""

    def __init__(self, encode: Encode, wrapping: Wrapping, placeholder: int) -> None:
        self._encode, self._wrapping, self._placeholder = encode, wrapping, placeholder
        self.forks: dict[str, UnionPosition] = {}
        self.notes: list[str] = []
        self.has_messages = False
        self._n_tokens, self._n_chars = 0, 0

    def place(
        self, module: Module, path: str, start: int, in_message: bool, head: tuple[int, ...] = ()
    ) -> ModulePosition:
        """A module from `start` on, `head` before all else."""
        self._n_chars += len(path)
        if self._n_chars > MAX_PML_CHARS:
            raise module.at.error(f"paths of {self._n_chars} characters", "shorter names, or less depth")
        check_scope(module.items)
        parts, text, at = list[Part](), list(head), start + len(head)
        for item, inside in self._flat(module.items, in_message):
            part = self._part(item, path, at, inside)
            at = part.stop
            if isinstance(part, TokenRange) and not part.param:
                text += part.tokens
                continue
            if text:
                parts.append(TokenRange(path, part.start - len(text), tuple(text)))
                text = []
            parts.append(part)
        if text:
            parts.append(TokenRange(path, at - len(text), tuple(text)))
        return ModulePosition(module.name, path, start, at, tuple(parts), module.cache, in_message, module.at)

    def run(self, paths: tuple[str, ...], own: Mapping[str, tuple[TokenRange, ...]], at: SourcePosition) -> SchemaRun:
        """What these own, to be encoded together; PMLError where all runs together have too many tokens."""
        stretches = [each for path in paths for each in own[path]]
        if not stretches:
            raise at.error("a scaffold without text", "modules that have text of their own")
        self._n_tokens += sum(len(each.tokens) for each in stretches)
        if self._n_tokens > MAX_SCHEMA_TOKENS:
            raise at.error(
                f"{self._n_tokens} tokens to encode", f"at most {MAX_SCHEMA_TOKENS} in all modules and scaffolds"
            )
        return SchemaRun(paths, tuple(sorted(stretches, key=lambda each: each.start)))

    def _flat(self, items: Sequence[Item], in_message: bool) -> Iterator[tuple[Item | tuple[int, ...], bool]]:
        """Items without messages: what the template writes around them as ids, then whether they are in a message.

        White space beside messages is no text: what stands between them is the template's.
        """
        for i, item in enumerate(items):
            beside = items[max(0, i - 1) : i + 2]
            if isinstance(item, Role):
                yield from self._message(item, in_message)
            elif not (
                isinstance(item, TextNode) and not item.text.strip() and any(isinstance(b, Role) for b in beside)
            ):
                yield item, in_message

    def _message(self, item: Role, in_message: bool) -> Iterator[tuple[Item | tuple[int, ...], bool]]:
        if in_message:
            raise item.at.error(f"'<{item.role}>' in another message", "a message beside messages")
        self.has_messages = True
        before, after = self._wrapping.around(item.role)
        yield opened(self._encode, before), True
        yield from self._flat(item.items, True)
        yield tuple(self._encode(after, True)), True

    def _part(self, item: Item | tuple[int, ...], path: str, at: int, inside: bool) -> Part:
        match item:
            case TextNode(text):
                return TokenRange(path, at, tuple(self._encode(text, False)))
            case Param():
                return TokenRange(path, at, self._stand_in(item), item.name)
            case Module():
                return self.place(item, _below(path, item.name), at, inside)
            case Union():
                return self._fork(item, path, at, inside)
            case tuple():
                return TokenRange(path, at, item)
            case _:
                raise item.at.error(f"a message in '{path}'", "text, parameters, modules and unions")

    def _stand_in(self, param: Param) -> tuple[int, ...]:
        """What stands in a parameter's room while its module is encoded: its scaffold, then placeholders."""
        tokens = tuple(self._encode(param.scaffold, False)) if param.scaffold else ()
        if len(tokens) > param.length:
            said = f"scaffold of parameter '{param.name}' has {len(tokens)} tokens and is cut to its len"
            self.notes.append(f"line {param.at.line}: {said}, {param.length}")
        return tokens[: param.length] + (self._placeholder,) * (param.length - len(tokens))

    def _fork(self, union: Union, path: str, at: int, inside: bool) -> UnionPosition:
        places = tuple(self.place(each, _below(path, each.name), at, inside) for each in union.modules)
        default = next((place.path for place in places if place.name == union.scaffold), "")
        if union.scaffold and not default:
            there = one_of(union.scaffold, (place.name for place in places))
            self.notes.append(
                f"line {union.at.line}: scaffold '{union.scaffold}' is no module of its union, wanted {there}"
            )
        fork = UnionPosition(at, max((place.stop for place in places), default=at), places, default)
        self.forks.update((place.path, fork) for place in places)
        return fork


def opened(encode: Encode, before: str) -> tuple[int, ...]:
    """Ids of what a template writes before a text, with what the tokenizer puts before that: some put a space behind
    every control token."""
    ids, letter = tuple(encode(before, True)), "a"
    together, space = tuple(encode(before + letter, True)), tuple(encode(" ", False))
    is_put = together != (*ids, *encode(letter, False)) and together == (*ids, *encode(f" {letter}", False))
    return (*ids, *space) if is_put else ids


def _below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _walk(place: ModulePosition) -> Iterator[ModulePosition]:
    yield place
    for each in place.places():
        yield from _walk(each)


def _is_worth(place: ModulePosition, min_tokens: int) -> bool:
    return place.is_cached and sum(len(each.tokens) for each in place.own if not each.param) >= max(1, min_tokens)


def _standing_in(place: ModulePosition, places: Mapping[str, ModulePosition]) -> Iterator[str]:
    """A module, and all that stands in for its unions."""
    yield place.path
    for part in place.parts:
        if isinstance(part, UnionPosition) and part.default:
            yield from _standing_in(places[part.default], places)


def _together(
    scaffold: Scaffold, places: Mapping[str, ModulePosition], forks: Mapping[str, UnionPosition], name: str
) -> tuple[str, ...]:
    """The paths that a `<scaffold>` names; PMLError where no prompt can import all of it."""
    paths = tuple(dict.fromkeys("" if path == "." else path for path in scaffold.modules))
    for path in paths:
        place = places.get(path)
        if place is None:
            raise scaffold.at.error(f"module '{path}' in a scaffold of '{name}'", one_of(path, places))
        if not place.is_cached:
            raise scaffold.at.error(f"module '{path}' in a scaffold", "modules that are cached")
    check_together(((path, scaffold.at) for path in paths), forks)
    return paths


def check_together(named: Iterable[tuple[str, SourcePosition]], forks: Mapping[str, UnionPosition]) -> None:
    """PMLError where a module is named without the one that it stands in, or beside another of its union."""
    named = tuple(named)
    paths, taken = {path for path, _ in named}, dict[int, str]()
    for path, at in named:
        parent = path.rpartition("/")[0]
        if parent and parent not in paths:
            raise at.error(f"'{path}' without '{parent}', which it stands in", "both")
        rival = taken.setdefault(id(forks[path]), path) if path in forks else path
        if rival != path:
            raise at.error(f"'{rival}' and '{path}' of one union", "one of them")


def _outline(
    place: ModulePosition, depth: int
) -> Iterator[tuple[int, str, ModulePosition | UnionPosition | TokenRange]]:
    yield depth, "module" if place.path else "schema", place
    for part in place.parts:
        if isinstance(part, TokenRange):
            yield depth + 1, "param" if part.param else "text", part
        elif isinstance(part, UnionPosition):
            yield depth + 1, "union", part
            for each in part.places:
                yield from _outline(each, depth + 2)
        else:
            yield from _outline(part, depth + 1)
