"""A prompt in PML over a schema's layout -> a Prompt: what is reused, from which run, and what is fresh, where.

Imported modules stand where their schema has them (Prompt Cache 3.4). Arguments are fresh, at the positions of their
parameters, of which the rest stays empty; so are texts of the prompt's own: behind the module that is imported before
them, or else behind what stands before the next one. Where such a text is longer than the room there, all behind it
moves by what is missing, which its keys can. Messages behind all imports stand behind all else that the prompt has: for
modules at the schema's end that are not imported no room is left before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from ragfuse.schemas.layout import (
    Encode,
    ModulePosition,
    SchemaLayout,
    SchemaRun,
    TokenRange,
    UnionPosition,
    check_together,
    opened,
)
from ragfuse.schemas.nodes import Import, MessageNode, PMLPrompt, SourcePosition, TextNode
from ragfuse.schemas.pml import one_of
from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Kind, Prompt, Segment

KeyOf = Callable[[SchemaRun], ChunkKey]
"""The key of a run that was encoded alone, at its own positions; its layout is `SchemaRun.layout`."""


@dataclass(frozen=True)
class SchemaUse:
    """What a prompt takes from its schema, for those who see the prompt alone: `Prompt.taken`.

    modules: (path, key of the run that it is taken from) in order of positions, None: it is computed; "." is the
    schema's own text. runs: by key. others: keys of `Bound.others`.
    """

    schema: str
    modules: tuple[tuple[str, ChunkKey | None], ...]
    runs: Mapping[ChunkKey, SchemaRun] = field(repr=False)
    others: tuple[ChunkKey, ...] = ()


@dataclass(frozen=True)
class Bound:
    """A prompt, and what the schema gives for it.

    imported: paths in order of positions. runs: those that the prompt takes rows from. others: of the other modules of
    the unions that were used, which the next prompt may want. moved: positions by which the end was moved.
    """

    prompt: Prompt
    imported: tuple[str, ...]
    runs: tuple[SchemaRun, ...]
    others: tuple[SchemaRun, ...]
    moved: int = 0


def bind(request: PMLPrompt, layout: SchemaLayout, encode: Encode, key_of: KeyOf, blend: bool = False) -> Bound:
    """The Prompt of a request over its schema's layout. PMLError for imports and arguments that the schema has not.

    It ends with a fresh run: the request's ending; else what makes the model answer, where there are messages; else
    the last token alone. blend: rows of modules are on offer to be recomputed, as a chunk's are.
    """
    if request.schema != layout.schema.name:
        raise request.at.error(f"a prompt for schema '{request.schema}'", f"'{layout.schema.name}'")
    key_of, wishes = cache(key_of), _Wishes(layout, encode)  # a run may be in many pieces
    wishes.scope(layout.root, request.items, request.args, request.at)
    check_together(wishes.imports.items(), layout.forks)
    placing = _Placing(layout, wishes, _sources(layout, wishes.imports), key_of, "chunk" if blend else "module")
    placing.scope(layout.root)
    ending = tuple(encode(request.ending, False)) if request.ending else _asking(request, layout, encode)
    placing.free(_Free(ending, request.at))
    prompt, others = placing.prompt(request.at), tuple(dict.fromkeys(_others(layout, wishes.imports)))
    taken = placing.taken(tuple(map(key_of, others)))
    return Bound(replace(prompt, taken=taken), tuple(placing.imported), tuple(placing.used), others, placing.moved)


@dataclass(frozen=True, slots=True)
class _Free:
    """Fresh tokens of the prompt's own."""

    tokens: tuple[int, ...]
    at: SourcePosition


class _Wishes:
    """What a prompt asks for, checked: imports, arguments by path, and texts by what they stand beside."""

    def __init__(self, layout: SchemaLayout, encode: Encode) -> None:
        self._layout, self._encode = layout, encode
        self.imports: dict[str, SourcePosition] = {}
        self.arguments: dict[str, dict[str, tuple[int, ...]]] = {}
        self.before: dict[str, list[_Free]] = {}
        self.behind: dict[str, list[_Free]] = {}
        self.at_end: dict[str, list[_Free]] = {}

    def scope(
        self,
        place: ModulePosition,
        items: tuple[TextNode | Import | MessageNode, ...],
        args: tuple[tuple[str, str], ...],
        at: SourcePosition,
    ) -> None:
        """What is wished inside of one module."""
        items = _stripped(items)
        self.arguments[place.path] = self._arguments(place, args, at)
        children = {child.name: child for child in place.places()}
        following, previous, waiting, has_ended = _following(items), None, list[_Free](), False
        for i, item in enumerate(items):
            if isinstance(item, Import):
                previous = self._import(item, place, children, waiting)
                waiting = []
                continue
            has_ended = has_ended or (following[i] is None and isinstance(item, MessageNode))
            if free := self._free(item, is_last=i == len(items) - 1):
                nowhere = has_ended or previous is None
                (waiting if nowhere else self.behind.setdefault(previous or "", [])).append(free)
                if isinstance(item, MessageNode) and not has_ended:
                    self._check_message(item, previous, following[i], children)
        self.at_end[place.path] = waiting

    def _import(
        self, item: Import, place: ModulePosition, children: Mapping[str, ModulePosition], waiting: list[_Free]
    ) -> str:
        child = children.get(item.name)
        if child is None:
            raise self._unknown(item, place, children)
        if child.path in self.imports:
            raise item.at.error(f"'{item.name}' once more", "each module once")
        self.imports[child.path] = item.at
        self.before[child.path] = waiting
        self.scope(child, item.items, item.args, item.at)
        return child.path

    def _unknown(self, item: Import, place: ModulePosition, children: Mapping[str, ModulePosition]) -> Exception:
        where = f"'{place.path}'" if place.path else f"schema '{self._layout.schema.name}'"
        deeper = [each.rpartition("/")[0] for each in self._layout.places if each.rpartition("/")[2] == item.name]
        if deeper:
            inside = one_of(item.name, deeper) if any(deeper) else "the schema itself"
            return item.at.error(f"module '{item.name}' in {where}", f"it in {inside}, where it stands")
        return item.at.error(f"module '{item.name}' in {where}, which it does not have", one_of(item.name, children))

    def _arguments(
        self, place: ModulePosition, args: tuple[tuple[str, str], ...], at: SourcePosition
    ) -> dict[str, tuple[int, ...]]:
        rooms = {part.param: len(part.tokens) for part in place.own if part.param}
        found = {}
        for name, value in args:
            if name not in rooms:
                where = f"'{place.path}'" if place.path else "the schema itself"
                raise at.error(f"argument '{name}' of {where}, which has no such parameter", one_of(name, rooms))
            tokens = tuple(self._encode(value, False))
            if len(tokens) > rooms[name]:
                raise at.error(f"argument '{name}' of {len(tokens)} tokens", f"at most {rooms[name]}")
            found[name] = tokens
        return found

    def _free(self, item: TextNode | MessageNode, is_last: bool) -> _Free | None:
        """A text's tokens; None for white space between imports. An answer at the end is for the model to go on."""
        if isinstance(item, TextNode):
            return _Free(tuple(self._encode(item.text, False)), item.at) if item.text.strip() else None
        before, after = self._layout.wrapping.around(item.role)
        is_open = is_last and item.role == "assistant"
        ends = () if is_open else tuple(self._encode(after, True))
        return _Free((*opened(self._encode, before), *self._encode(item.text, False), *ends), item.at)

    def _check_message(
        self, item: MessageNode, previous: str | None, following: str | None, children: Mapping[str, ModulePosition]
    ) -> None:
        """PMLError for a message between imports that stand in a message of the schema."""
        beside = self._layout.places[previous] if previous is not None else children.get(following or "")
        if beside is not None and beside.in_message:
            raise item.at.error(
                f"'<{item.role}>' beside '{beside.name}', which is in a message", "it behind all imports"
            )


def _sources(layout: SchemaLayout, imports: Mapping[str, SourcePosition]) -> dict[str, SchemaRun]:
    """The run that each module is taken from: a scaffold whose members are all there comes first (3.3)."""
    there, found = {"", *imports}, dict[str, SchemaRun]()
    for run in layout.scaffolds:
        if there.issuperset(run.members) and not any(path in found for path in run.members):
            found.update(dict.fromkeys(run.members, run))
    for path in ("", *imports):  # parents first
        own = layout.modules.get(path)
        if own is None or path in found:
            continue
        found[path] = own
        if there.issuperset(own.members):
            for member in own.members:
                if layout.places[member].is_cached:
                    found.setdefault(member, own)
    return found


def _others(layout: SchemaLayout, imports: Mapping[str, SourcePosition]) -> Iterator[SchemaRun]:
    for path in imports:
        for place in layout.forks[path].places if path in layout.forks else ():
            if place.path != path and place.path in layout.modules:
                yield layout.modules[place.path]


def _asking(request: PMLPrompt, layout: SchemaLayout, encode: Encode) -> tuple[int, ...]:
    """What makes the model answer, unless the prompt begins its answer."""
    items = _stripped(request.items)
    has_messages = any(isinstance(item, MessageNode) for item in items)
    is_open = has_messages and isinstance(items[-1], MessageNode) and items[-1].role == "assistant"
    if is_open or not (has_messages or layout.has_messages):
        return ()
    return tuple(encode(layout.wrapping.ask, True))


def _following(items: tuple[TextNode | Import | MessageNode, ...]) -> list[str | None]:
    """The name of the import behind each item, None behind all imports."""
    found, name = list[str | None](), None
    for item in reversed(items):
        found.append(name)
        name = item.name if isinstance(item, Import) else name
    return found[::-1]


def _stripped(items: tuple[TextNode | Import | MessageNode, ...]) -> tuple[TextNode | Import | MessageNode, ...]:
    """Without white space at the end, which is none of what is said."""
    n = len(items)
    while n and isinstance(last := items[n - 1], TextNode) and not last.text.strip():
        n -= 1
    return items[:n]


@dataclass(slots=True)
class _Piece:
    """Tokens that become one segment: rows from `lo` of a run on, or fresh."""

    start: int
    tokens: list[int]
    run: SchemaRun | None = None
    lo: int = 0
    origin: int = 0
    owner: str = ""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def goes_on(self, piece: _Piece) -> bool:
        """Whether a piece is just what follows this one: in the prompt, and in the run."""
        follows = self.run is None or self.lo + len(self.tokens) == piece.lo
        return follows and (self.stop, self.run, self.origin) == (piece.start, piece.run, piece.origin)


@dataclass
class _Placing:
    """Puts stretches and texts one behind the other. cursor: the first position that is free."""

    layout: SchemaLayout
    wishes: _Wishes
    sources: Mapping[str, SchemaRun]
    key_of: KeyOf
    kind: Kind
    pieces: list[_Piece] = field(default_factory=list)
    imported: list[str] = field(default_factory=list)
    used: dict[SchemaRun, None] = field(default_factory=dict)
    cursor: int = 0
    moved: int = 0
    _last: _Free | None = None

    def scope(self, place: ModulePosition) -> None:
        """All of a module that is imported, in order."""
        for part in place.parts:
            if isinstance(part, TokenRange):
                self._stretch(part)
                continue
            for child in part.places if isinstance(part, UnionPosition) else (part,):
                if child.path in self.wishes.imports:
                    self._child(child)
        for text in self.wishes.at_end[place.path]:
            self.free(text)

    def _child(self, place: ModulePosition) -> None:
        for text in self.wishes.before[place.path]:
            self.free(text)
        self.imported.append(place.path)
        self._make_room(place.start)
        self.scope(place)
        self.cursor = max(self.cursor, place.stop + self.moved)
        for text in self.wishes.behind.get(place.path, ()):
            self.free(text)

    def free(self, text: _Free) -> None:
        """A text of the prompt's own, where the cursor is."""
        if text.tokens:
            self._add(_Piece(self.cursor, list(text.tokens)))
            self._last = text

    def _stretch(self, part: TokenRange) -> None:
        self._make_room(part.start)
        start, run = part.start + self.moved, self.sources.get(part.owner)
        if part.param:
            given = self.wishes.arguments[part.owner].get(part.param, ())
            self._add(_Piece(start, list(given)))
        elif run is None:
            self._add(_Piece(start, list(part.tokens)))
        else:
            lo = run.rows[part.owner, part.start][0]
            self._add(_Piece(start, list(part.tokens), run, lo, run.start + self.moved, part.owner))
        self.cursor = part.stop + self.moved

    def _make_room(self, start: int) -> None:
        """Move what comes next behind what is there; PMLError where the model's KV cannot be moved."""
        missing = self.cursor - start - self.moved
        if missing <= 0:
            return
        if self.layout.fixed and self._last is not None:
            n = len(self._last.tokens)
            raise self._last.at.error(
                f"text of {n} tokens", f"at most {max(0, n - missing)} here, as this model's KV cannot be moved"
            )
        self.moved += missing

    def _add(self, piece: _Piece) -> None:
        """One piece more, or more of the last one, which it goes on."""
        if not piece.tokens:
            return
        self.cursor = piece.stop
        if self.pieces and self.pieces[-1].goes_on(piece):
            self.pieces[-1].tokens += piece.tokens
        else:
            self.pieces.append(piece)

    def prompt(self, at: SourcePosition) -> Prompt:
        """The segments. Where the last one is cached, its last token is fresh: something must be computed."""
        if not self.pieces:
            raise at.error("a prompt without a token", "text, or modules that have text")
        last = self.pieces[-1]
        if last.run is not None:
            token = _Piece(last.stop - 1, [last.tokens.pop()])
            self.pieces[-1:] = [last] if last.tokens else []
            self._add(token)
        self.used = dict.fromkeys(piece.run for piece in self.pieces if piece.run is not None)
        return Prompt(tuple(self._segment(piece) for piece in self.pieces))

    def taken(self, others: tuple[ChunkKey, ...]) -> SchemaUse:
        """What of the schema is in the prompt, after `prompt`."""
        runs = {self.key_of(run): run for run in self.used}
        sources = {path: self.key_of(run) for path, run in self.sources.items() if run in self.used}
        own = [("", sources[""])] if "" in sources else []
        modules = [*own, *((path, sources.get(path)) for path in self.imported)]
        return SchemaUse(self.layout.schema.name, tuple((path or ".", key) for path, key in modules), runs, others)

    def _segment(self, piece: _Piece) -> Segment:
        if piece.run is None:
            return Segment(tuple(piece.tokens), piece.start)
        source = f"{self.layout.schema.name}: {piece.owner or '.'}"
        keys, rows = (self.key_of(piece.run),), (piece.lo, piece.lo + len(piece.tokens))
        if rows == (0, len(piece.run.tokens)):
            return Segment(tuple(piece.tokens), piece.start, self.kind, keys, source)
        return Segment(tuple(piece.tokens), piece.start, self.kind, keys, source, rows=rows, origin=piece.origin)
