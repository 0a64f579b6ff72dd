"""Bind a PML prompt to a schema's layout: build a `Prompt` of reused modules and fresh texts.

Imported modules keep their schema positions (Prompt Cache 3.4). Arguments are fresh text at the
positions of their parameters. Unused positions of a parameter stay empty. The prompt's own texts
are fresh too. A text that follows an import is placed right after the imported module. Texts before
the first import are placed before the first imported module, from the first free position on. If a
text overlaps the next module, all later modules are shifted: their keys are rotated. Messages after
all imports come last. Modules at the schema's end that are not imported take no positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from ragfuse.schemas.layout import (
    Encode,
    ModulePosition,
    SchemaLayout,
    SchemaRun,
    TokenRange,
    check_together,
    opened,
)
from ragfuse.schemas.nodes import (
    Import,
    PMLPrompt,
    PromptItem,
    Role,
    SourcePosition,
    TextNode,
    has_messages,
)
from ragfuse.schemas.pml import one_of
from ragfuse.types.keys import ChunkKey, Kind
from ragfuse.types.prompt import Prompt, Segment

KeyOf = Callable[[SchemaRun], ChunkKey]
"""Returns the key of a `SchemaRun`'s KV. The key's `layout` is `SchemaRun.layout()`."""
Items = tuple[PromptItem, ...]


@dataclass(frozen=True)
class SchemaUse:
    """The parts of a schema that a prompt reuses, for later stages (`Prompt.schema_use`).

    Args:
        schema: Name of the schema.
        modules: (path, key) of each imported module, by position. Path "." is the schema's own
            text. The key is that of the reused `SchemaRun`, or None if the module is computed.
        runs: Every `SchemaRun` that the prompt reuses, by key.
        others: Keys of modules that share a union with an imported module, but are not imported
            themselves. The next prompt may import these modules.
    """

    schema: str
    modules: tuple[tuple[str, ChunkKey | None], ...]
    runs: Mapping[ChunkKey, SchemaRun] = field(repr=False)
    others: tuple[ChunkKey, ...] = ()


def bind(
    request: PMLPrompt, layout: SchemaLayout, encode: Encode, key_of: KeyOf, blend: bool = False
) -> Prompt:
    """Create the `Prompt` of a PML prompt over its schema's layout.

    Messages are followed by the generation prompt, unless the last message is an assistant's. The
    prompt's last token is always fresh, even if the prompt ends with a reused module.

    Args:
        request: The PML prompt.
        layout: The layout of the prompt's schema.
        encode: The tokenizer.
        key_of: Returns the key under which the KV of a `SchemaRun` is stored.
        blend: True if policies may recompute tokens of modules, as they do for chunks.

    Raises:
        PMLError: An import or argument does not exist in the schema or does not fit.
    """
    imports = dict[str, SourcePosition]()
    _import(layout, layout.root, request.items, imports)
    check_together(imports, layout.places)
    key_of = cache(key_of)  # many pieces have the same `SchemaRun`
    placing = _Placing(
        layout, encode, _sources(layout, imports), key_of, "chunk" if blend else "module"
    )
    placing.scope(layout.root, request.items, request.args, request.at)
    placing.free(_Free(_ending(request, layout, encode), request.at))
    unions = {layout.places[path].union for path in imports} - {0}
    others = dict.fromkeys(
        key_of(run)
        for path, run in layout.modules.items()
        if layout.places[path].union in unions and path not in imports
    )
    return placing.prompt(request.at, tuple(others))


def _import(
    layout: SchemaLayout, place: ModulePosition, items: Items, imports: dict[str, SourcePosition]
) -> None:
    """Record in `imports` each module that `items` import; all are inside the module `place`."""
    children = {child.name: child for child in place.places}
    for item in items:
        if not isinstance(item, Import):
            continue
        child = children.get(item.name)
        if child is None:
            elsewhere = [path for path in layout.places if path.rpartition("/")[2] == item.name]
            where = place.path or layout.schema.name
            raise item.at.error(
                f"unknown module '{item.name}' in '{where}'",
                one_of(item.name, elsewhere or children),
            )
        if child.path in imports:
            raise item.at.error(f"module '{item.name}' imported twice", "each module once")
        imports[child.path] = item.at
        _import(layout, child, item.items, imports)


@dataclass(frozen=True, slots=True)
class _Free:
    """Tokens of one of the prompt's own texts. `role` is "" unless the text is a message."""

    tokens: tuple[int, ...]
    at: SourcePosition
    role: str = ""


def _sources(layout: SchemaLayout, imports: Mapping[str, SourcePosition]) -> dict[str, SchemaRun]:
    """Return a dict from module path to the `SchemaRun` whose KV is reused. If all modules of a
    scaffold are imported, the scaffold's run is preferred (Prompt Cache 3.3).
    """
    imported, found = {"", *imports}, dict[str, SchemaRun]()
    for run in layout.scaffolds:
        if imported.issuperset(run.members) and not any(path in found for path in run.members):
            found.update(dict.fromkeys(run.members, run))
    for path in ("", *imports):  # a module comes before its nested modules
        module_run = layout.modules.get(path)
        if module_run is None or path in found:
            continue
        found[path] = module_run
        if imported.issuperset(module_run.members):
            for member in module_run.members:
                if layout.places[member].is_cached:
                    found.setdefault(member, module_run)
    return found


def _ending(request: PMLPrompt, layout: SchemaLayout, encode: Encode) -> tuple[int, ...]:
    """Return the generation prompt's ids; () if no message exists or the last is an assistant's."""
    roles = [item.role if isinstance(item, Role) else "" for item in _stripped(request.items)]
    if roles[-1:] == ["assistant"] or not (any(roles) or has_messages(layout.schema.items)):
        return ()
    return tuple(encode(layout.wrapping.ask, True))


def _stripped(items: Items) -> Items:
    """Return the items without white-space texts at the end."""
    n = len(items)
    while n and isinstance(last := items[n - 1], TextNode) and not last.text.strip():
        n -= 1
    return items[:n]


@dataclass(slots=True)
class _Piece:
    """Tokens of one segment, copied from `run.tokens[lo:]`. If `run` is None, they are fresh."""

    start: int
    tokens: list[int]
    run: SchemaRun | None = None
    lo: int = 0
    origin: int = 0
    owner: str = ""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def is_continued_by(self, other: _Piece) -> bool:
        """Return whether `other` directly follows this piece, both in the prompt and in `run`."""
        follows = self.run is None or self.lo + len(self.tokens) == other.lo
        return follows and (self.stop, self.run, self.origin) == (
            other.start,
            other.run,
            other.origin,
        )


@dataclass
class _Placing:
    """Places the token ranges of modules, and the prompt's own texts, in order.

    `cursor` is the first free position. All later modules are shifted by `moved` positions.
    """

    layout: SchemaLayout
    encode: Encode
    sources: Mapping[str, SchemaRun]
    key_of: KeyOf
    kind: Kind
    pieces: list[_Piece] = field(default_factory=list)
    imported: list[str] = field(default_factory=list)
    cursor: int = 0
    moved: int = 0
    _last: _Free | None = None

    def scope(
        self,
        place: ModulePosition,
        items: Items,
        args: tuple[tuple[str, str], ...],
        at: SourcePosition,
    ) -> None:
        """Place a module and the prompt's imports and texts inside it, in order of position."""
        items, arguments = _stripped(items), self._arguments(place, args, at)
        last_import = max(
            (i for i, item in enumerate(items) if isinstance(item, Import)), default=-1
        )
        # each import with the texts before and after the import
        imports = dict[str, tuple[Import, list[_Free], list[_Free]]]()
        texts = at_end = list[_Free]()
        for i, item in enumerate(items):
            if isinstance(item, Import):
                imports[item.name] = item, [] if imports else texts, (texts := [])
                at_end = []
                continue
            if i > last_import and isinstance(item, Role):
                texts = at_end
            if free := self._free(item, is_last=i == len(items) - 1):
                texts.append(free)
        for part in place.parts:
            if isinstance(part, TokenRange):
                self._place_range(part, arguments)
            elif part.name in imports:
                self._child(part, *imports[part.name])
        for text in at_end:
            self.free(text)

    def _child(
        self, place: ModulePosition, item: Import, before: list[_Free], behind: list[_Free]
    ) -> None:
        for text in (*before, *behind):
            if text.role and place.in_message:
                found = f"'<{text.role}>' next to module '{place.name}', part of a schema message"
                raise text.at.error(found, "the message after all imports")
        for text in before:
            self.free(text)
        self.imported.append(place.path)
        self._make_room(place.start)
        self.scope(place, item.items, item.args, item.at)
        self.cursor = max(self.cursor, place.stop + self.moved)
        for text in behind:
            self.free(text)

    def _arguments(
        self, place: ModulePosition, args: tuple[tuple[str, str], ...], at: SourcePosition
    ) -> dict[str, tuple[int, ...]]:
        max_tokens = {part.param: len(part.tokens) for part in place.ranges if part.param}
        found = {}
        for name, value in args:
            if name not in max_tokens:
                where = f"'{place.path}'" if place.path else "the schema itself"
                raise at.error(f"unknown argument '{name}' of {where}", one_of(name, max_tokens))
            tokens = tuple(self.encode(value, False))
            if len(tokens) > max_tokens[name]:
                raise at.error(
                    f"argument '{name}' of {len(tokens)} tokens", f"at most {max_tokens[name]}"
                )
            found[name] = tokens
        return found

    def _free(self, item: TextNode | Role, is_last: bool) -> _Free | None:
        """Return a text's tokens, or None for white space. A final assistant message stays open."""
        if isinstance(item, TextNode):
            return (
                _Free(tuple(self.encode(item.text, False)), item.at) if item.text.strip() else None
            )
        before, after = self.layout.wrapping.around(item.role)
        text = "".join(each.text for each in item.items if isinstance(each, TextNode))
        is_open = is_last and item.role == "assistant"
        ends = () if is_open else tuple(self.encode(after, True))
        return _Free(
            (*opened(self.encode, before), *self.encode(text, False), *ends),
            item.at,
            item.role,
        )

    def free(self, text: _Free) -> None:
        """Place one of the prompt's own texts at the cursor."""
        if text.tokens:
            self._add(_Piece(self.cursor, list(text.tokens)))
            self._last = text

    def _place_range(self, part: TokenRange, arguments: Mapping[str, tuple[int, ...]]) -> None:
        self._make_room(part.start)
        start, run = part.start + self.moved, self.sources.get(part.owner)
        if part.param:
            self._add(_Piece(start, list(arguments.get(part.param, ()))))
        elif run is None:
            self._add(_Piece(start, list(part.tokens)))
        else:
            lo, origin = bisect_left(run.positions, part.start - run.start), run.start + self.moved
            self._add(_Piece(start, list(part.tokens), run, lo, origin, part.owner))
        self.cursor = part.stop + self.moved

    def _make_room(self, start: int) -> None:
        """Shift later modules if a text reaches past `start`. PMLError if KV cannot be moved."""
        overlap = self.cursor - start - self.moved
        if overlap <= 0:
            return
        if self.layout.fixed and self._last is not None:
            n = len(self._last.tokens)
            raise self._last.at.error(
                f"text of {n} tokens",
                f"at most {max(0, n - overlap)}, because this model's KV after it cannot be moved",
            )
        self.moved += overlap

    def _add(self, piece: _Piece) -> None:
        """Add a piece. If the piece continues the last piece, both pieces are merged."""
        if not piece.tokens:
            return
        self.cursor = piece.stop
        if self.pieces and self.pieces[-1].is_continued_by(piece):
            self.pieces[-1].tokens += piece.tokens
        else:
            self.pieces.append(piece)

    def prompt(self, at: SourcePosition, others: tuple[ChunkKey, ...]) -> Prompt:
        """Return the Prompt of all placed pieces. The last token is always fresh."""
        if not self.pieces:
            raise at.error("an empty prompt", "text, or a module with text")
        last = self.pieces[-1]
        if last.run is not None:
            token = _Piece(last.stop - 1, [last.tokens.pop()])
            self.pieces[-1:] = [last] if last.tokens else []
            self._add(token)
        runs = {self.key_of(piece.run): piece.run for piece in self.pieces if piece.run is not None}
        keys = {
            path: self.key_of(run) for path, run in self.sources.items() if run in runs.values()
        }
        own = ("",) if "" in keys else ()
        modules = tuple((path or ".", keys.get(path)) for path in (*own, *self.imported))
        use = SchemaUse(self.layout.schema.name, modules, runs, others)
        return Prompt(tuple(self._segment(piece) for piece in self.pieces), schema_use=use)

    def _segment(self, piece: _Piece) -> Segment:
        if piece.run is None:
            return Segment(tuple(piece.tokens), piece.start)
        return Segment(
            tuple(piece.tokens),
            piece.start,
            self.kind,
            (self.key_of(piece.run),),
            f"{self.layout.schema.name}: {piece.owner or '.'}",
            rows=(piece.lo, piece.lo + len(piece.tokens)),
            origin=piece.origin,
        )
