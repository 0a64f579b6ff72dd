"""Schemas laid out over a tokenizer whose tokens are characters, so that positions can be counted
by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hypothesis import strategies as some

from ragfuse.errors import PMLError
from ragfuse.schemas.bind import SchemaUse, bind
from ragfuse.schemas.layout import NO_WRAPPING, Encode, SchemaLayout, SchemaRun, Wrapping, lay_out
from ragfuse.schemas.nodes import (
    Import,
    Item,
    Module,
    Param,
    PMLPrompt,
    PromptItem,
    Role,
    Scaffold,
    Schema,
    TextNode,
    Union,
    inner,
)
from ragfuse.schemas.pml import PML_ROLES, parse_prompt, parse_schema
from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.prompt import Prompt

GAP = 0  # the placeholder
TURNS = Wrapping(("{S", "}"), ("{U", "}"), ("{A", "}"), "{A")


def encode(text: str, special: bool) -> list[int]:
    """One token a character; of a template's own text other ones."""
    return [ord(char) + 1000 * special for char in text]


def said(tokens: Sequence[int]) -> str:
    """Tokens as text, `_` for what stands in for an argument."""
    return "".join("_" if token == GAP else chr(token % 1000) for token in tokens)


def key_of(run: SchemaRun) -> ChunkKey:
    return ChunkKey("m", token_digest(run.tokens), "", run.layout())


def laid(
    inside: str, wrapping: Wrapping = NO_WRAPPING, min_tokens: int = 1, fixed: bool = False
) -> SchemaLayout:
    """The layout of a schema `s`."""
    return lay_out(schema_of(inside), encode, GAP, wrapping, min_tokens=min_tokens, fixed=fixed)


def schema_of(inside: str) -> Schema:
    """A schema `s`."""
    return parse_schema(f'<schema name="s">{inside}</schema>')


def asked(inside: str, args: str = "") -> PMLPrompt:
    """A prompt in PML over `s`."""
    return parse_prompt(f'<prompt schema="s" {args}>{inside}</prompt>')


@dataclass(frozen=True)
class Bound:
    """A prompt over a schema: what it imports, the runs that it reuses rows of, and those of other
    alternatives.
    """

    prompt: Prompt
    imported: tuple[str, ...]
    runs: tuple[SchemaRun, ...]
    others: tuple[SchemaRun, ...]

    @classmethod
    def of(
        cls, request: PMLPrompt, layout: SchemaLayout, encode: Encode, blend: bool = False
    ) -> Bound:
        prompt = bind(request, layout, encode, key_of, blend)
        use = prompt.schema_use
        assert isinstance(use, SchemaUse)
        runs = {key_of(run): run for run in layout.runs}
        imported = tuple(path for path, _ in use.modules if path != ".")
        return cls(
            prompt, imported, tuple(use.runs.values()), tuple(runs[key] for key in use.others)
        )


def bound(layout: SchemaLayout, inside: str, args: str = "", blend: bool = False) -> Bound:
    """Such a prompt, bound."""
    return Bound.of(asked(inside, args), layout, encode, blend)


def shown(prompt: Prompt) -> list[tuple[str, int, str]]:
    """(kind, start, text) of every segment."""
    return [(segment.kind, segment.start, said(segment.tokens)) for segment in prompt.segments]


def read(prompt: Prompt) -> str:
    """The text as it stands, with `.` for every position without a token."""
    text = ""
    for segment in prompt.segments:
        text += "." * (segment.start - len(text)) + said(segment.tokens)
    return text


@dataclass(frozen=True)
class Told:
    """One token as the slow twin has it."""

    owner: str
    position: int
    token: int
    param: str = ""


def twin(schema: Schema, wrapping: Wrapping) -> list[Told]:
    """Every token of a schema, one by one, straight from the rules: the slow twin of `lay_out`."""
    return list(_told(schema.items, "", 0, wrapping))


def _told(items: Sequence[Item], owner: str, at: int, wrapping: Wrapping) -> Iterator[Told]:
    kept = _kept(items)
    for i, item in enumerate(kept):
        yield from _of_item(
            item, owner, at + sum(_size(each, wrapping) for each in kept[:i]), wrapping
        )


def _of_item(item: Item, owner: str, at: int, wrapping: Wrapping) -> Iterator[Told]:
    if isinstance(item, TextNode):
        yield from (Told(owner, at + i, ord(char)) for i, char in enumerate(item.text))
    elif isinstance(item, Param):
        ids = [ord(char) for char in item.scaffold][: item.length]
        yield from (
            Told(owner, at + i, [*ids, *[GAP] * item.length][i], item.name)
            for i in range(item.length)
        )
    elif isinstance(item, Role):
        before, after = wrapping.around(item.role)
        yield from (Told(owner, at + i, ord(char) + 1000) for i, char in enumerate(before))
        yield from _told(item.items, owner, at + len(before), wrapping)
        end = at + _size(item, wrapping) - len(after)
        yield from (Told(owner, end + i, ord(char) + 1000) for i, char in enumerate(after))
    else:
        for module in item.modules if isinstance(item, Union) else (item,):
            yield from _told(module.items, f"{owner}/{module.name}".strip("/"), at, wrapping)


def _size(item: Item, wrapping: Wrapping) -> int:
    """Positions that an item takes."""
    if isinstance(item, TextNode):
        return len(item.text)
    if isinstance(item, Param):
        return item.length
    if isinstance(item, Union):
        return max((_size(module, wrapping) for module in item.modules), default=0)
    around = sum(map(len, wrapping.around(item.role))) if isinstance(item, Role) else 0
    return around + sum(_size(each, wrapping) for each in _kept(item.items))


def _kept(items: Sequence[Item]) -> list[Item]:
    """Without white space beside messages."""
    return [item for i, item in enumerate(items) if not _is_markup(items, i)]


def _is_markup(items: Sequence[Item], i: int) -> bool:
    item, around = items[i], (*items[max(0, i - 1) : i], *items[i + 1 : i + 2])
    return (
        isinstance(item, TextNode)
        and not item.text.strip()
        and any(isinstance(each, Role) for each in around)
    )


# schemas made up

NAMES = some.sampled_from(["a", "b", "c.py", "d-1", "é", "f"])
WRITTEN = some.text("xyz .<&>\"'\r\n\t]é🦊", min_size=1, max_size=12)
TEXTS = some.builds(TextNode, some.one_of(WRITTEN, some.just(" \n ")))
PARAMS = some.builds(
    Param, some.sampled_from("pq"), some.just(4), some.sampled_from(["", "uv", 'uvw<&"xyz'])
)


def apart(items: Sequence[Item]) -> tuple[Item, ...]:
    """Without texts beside texts, and without what has a name that stands there already."""
    kept: list[Item] = []
    seen: set[str] = set()
    for item in items:
        names = [each.name for each in inner((item,)) if isinstance(each, Module)]
        is_more = isinstance(item, TextNode) and kept and isinstance(kept[-1], TextNode)
        if not is_more and not seen & {*names} and len({*names}) == len(names):
            seen |= {*names}
            kept.append(item)
    return tuple(kept)


def _module(items: some.SearchStrategy[Item]) -> some.SearchStrategy[Module]:
    cached = some.sampled_from([True, True, True, False])
    return some.builds(Module, NAMES, some.lists(items, max_size=4).map(apart), cached)


def _union(items: some.SearchStrategy[Item]) -> some.SearchStrategy[Union]:
    modules = some.lists(_module(items), max_size=3, unique_by=lambda module: module.name).map(
        tuple
    )
    return some.builds(Union, modules, some.one_of(some.just(""), NAMES))


ITEMS: some.SearchStrategy[Item] = some.recursive(
    some.one_of(TEXTS, PARAMS),
    lambda items: some.one_of(_module(items), _union(items)),
    max_leaves=10,
)
MESSAGES = some.builds(Role, some.sampled_from(PML_ROLES), some.lists(ITEMS, max_size=4).map(apart))
ALL = some.lists(some.one_of(ITEMS, MESSAGES), max_size=5).map(apart)


@some.composite
def schemas(draw: some.DrawFn) -> Schema:
    """Schemas, with up to two scaffolds that have text."""
    schema = Schema("s", draw(ALL))
    for _ in range(draw(some.integers(0, 2))):
        paths = (*draw(some.sampled_from([(), (".",)])), *draw(together(schema.items)))
        more = replace(schema, scaffolds=(*schema.scaffolds, Scaffold(paths)))
        with suppress(PMLError):  # one without text
            lay_out(more, encode, GAP, TURNS)
            schema = more
    return schema


@some.composite
def together(draw: some.DrawFn, items: tuple[Item, ...], inside: str = "") -> tuple[str, ...]:
    """Paths of cached modules that one prompt may import, each with what it stands in."""
    found: list[str] = []
    for item in items:
        modules = (
            item.modules if isinstance(item, Union) else (item,) if isinstance(item, Module) else ()
        )
        cached = [module for module in modules if module.cache]
        if isinstance(item, Role):
            found += draw(together(item.items, inside))
        elif cached and draw(some.booleans()):
            module = draw(some.sampled_from(cached))
            path = f"{inside}/{module.name}".strip("/")
            found += [path, *draw(together(module.items, path))]
    return tuple(found)


SCHEMAS = schemas()


def importing(paths: Sequence[str], inside: str = "") -> tuple[Import, ...]:
    """The imports of all these."""
    parents = [path.rpartition("/") for path in paths if path not in ("", ".")]
    return tuple(
        Import(name, (), importing(paths, f"{parent}/{name}".strip("/")))
        for parent, _, name in parents
        if parent == inside
    )


@some.composite
def requests(
    draw: some.DrawFn, items: tuple[Item, ...], is_root: bool = True
) -> tuple[PromptItem, ...]:
    """What a prompt may import of these items, with arguments and texts of its own."""
    found: list[PromptItem] = []
    for item in items:
        modules = (
            item.modules if isinstance(item, Union) else (item,) if isinstance(item, Module) else ()
        )
        if isinstance(item, Role):
            found += draw(requests(item.items, False))
        elif modules and draw(some.booleans()):
            module = draw(some.sampled_from(modules))
            found.append(
                Import(
                    module.name, draw(arguments(module.items)), draw(requests(module.items, False))
                )
            )
        elif draw(some.integers(0, 7)) == 0:
            found.append(TextNode(draw(some.sampled_from(["more", "  ", "much <more> of it"]))))
    if is_root and draw(some.booleans()):
        found.append(Role(draw(some.sampled_from(PML_ROLES)), (TextNode("why?"),)))
    return apart(found)


@some.composite
def arguments(draw: some.DrawFn, items: tuple[Item, ...]) -> tuple[tuple[str, str], ...]:
    """Arguments for some of the parameters."""
    names = sorted({each.name for each in inner(items) if isinstance(each, Param)})
    return tuple(
        (name, draw(some.text("ABC", max_size=4))) for name in names if draw(some.booleans())
    )
