"""Parser and writer of PML, the Prompt Markup Language of schemas and prompts (Prompt Cache 3.2).

Errors name file, line and column. DTDs are rejected, so nothing is fetched. Nesting is limited.
White space is text. Comments are dropped. `schemas/layout.py` assigns token positions and checks
that names are unique.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from ragfuse.errors import PMLError
from ragfuse.schemas.nodes import (
    Import,
    Item,
    Module,
    Param,
    PMLPrompt,
    PromptItem,
    Role,
    RoleName,
    Scaffold,
    Schema,
    SourcePosition,
    TextNode,
    Union,
    joined,
)
from ragfuse.types.texts import whole_text

Root = TypeVar("Root", Schema, PMLPrompt)
MAX_DEPTH = 64
MAX_MODULE_NAME_CHARS = 100
"""Limits of PML: levels of nesting, and characters of a name."""

PML_ROLES = ("system", "user", "assistant")
_PARTS = ("module", "union", "parameter", "param", *PML_ROLES)
_SCHEMA: Mapping[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = MappingProxyType(
    {
        "schema": ((*_PARTS, "scaffold"), "name", ()),
        "module": (_PARTS, "name", ("cache",)),
        "union": (("module",), "", ("scaffold",)),
        "scaffold": ((), "modules", ()),
        **dict.fromkeys(("parameter", "param"), ((), "name", ("len", "length", "scaffold"))),
        **dict.fromkeys(PML_ROLES, (_PARTS, "", ())),
    }
)
"""Schema elements by tag: allowed child elements, required attribute, optional attributes."""
PML_TAGS = frozenset({"prompt", *_SCHEMA})
"""Reserved tags, which module names cannot use."""


def parse(text: str, file: str = "") -> Schema | PMLPrompt:
    """Parse a PML text into a schema or a prompt.

    Args:
        text: The PML.
        file: Name of the text's file, for error messages.

    Raises:
        PMLError: The text cannot be parsed. The error names the source position.
    """
    root = _root(whole_text(text, file or "A text in PML"), file)
    if root.tag == "schema":
        return cast(Schema, _node(root))
    if root.tag != "prompt":
        raise root.at.error(f"'<{root.tag}>'", "'<schema>' or '<prompt>'")
    args = dict(root.attributes)
    if not (schema := args.pop("schema", "")):
        raise root.at.error("'<prompt>' without 'schema'", 'schema="..."')
    return PMLPrompt(schema, _imports(root), tuple(args.items()), at=root.at)


def parse_schema(text: str, file: str = "") -> Schema:
    """Parse the PML text of a schema. PMLError if the text is a prompt."""
    return _only(Schema, parse(text, file))


def parse_prompt(text: str, file: str = "") -> PMLPrompt:
    """Parse the PML text of a prompt. PMLError if the text is a schema."""
    return _only(PMLPrompt, parse(text, file))


def read(source: str | Path) -> Schema | PMLPrompt:
    """Parse PML text, or the UTF-8 file at a path. A `source` that begins with `<` is PML text.

    Raises:
        PMLError: The text cannot be parsed, or the file cannot be read.
    """
    if isinstance(source, str) and source.lstrip().startswith("<"):
        return parse(source)
    path = Path(source).expanduser()
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PMLError(
            f"no readable file ({error})", "a schema or prompt in UTF-8", str(path)
        ) from error
    return parse(text, str(path))


def read_schema(source: str | Path) -> Schema:
    """Parse a schema from a PML text or file, as `read` does. PMLError for a prompt."""
    return _only(Schema, read(source))


def read_prompt(source: str | Path) -> PMLPrompt:
    """Parse a prompt from a PML text or file, as `read` does. PMLError for a schema."""
    return _only(PMLPrompt, read(source))


def _only(kind: type[Root], found: Schema | PMLPrompt) -> Root:
    if not isinstance(found, kind):
        named = ("<schema>", "<prompt>") if kind is PMLPrompt else ("<prompt>", "<schema>")
        raise found.at.error(*named)
    return found


def is_name(name: str) -> bool:
    """Return whether a name's characters and length are valid for a module or parameter."""
    return (
        len(name) <= MAX_MODULE_NAME_CHARS
        and (name[:1] + re.sub("[.-]", "", name[1:])).isidentifier()
    )


def one_of(name: str, names: Iterable[str]) -> str:
    """List names similar to `name` for an error message. If none is similar, list eight names."""
    known = sorted({each for each in names if each})
    shown = (
        difflib.get_close_matches(name[:MAX_MODULE_NAME_CHARS], known[:1000], 3, 0.6) or known[:8]
    )
    listed = ", ".join(f"'{each}'" for each in shown)
    return f"one of {listed}" if len(shown) > 1 else listed or "none"


@dataclass(slots=True)
class _Element:
    """An XML element with attributes, content and source position."""

    tag: str
    attributes: dict[str, str]
    at: SourcePosition
    items: list[TextNode | _Element] = field(default_factory=list)


def _root(text: str, file: str) -> _Element:
    """Parse XML and return the root element. PMLError for invalid XML, a DTD or deep nesting."""
    parser = expat.ParserCreate("utf-8")
    opened = [_Element("document", {}, SourcePosition(file, 1))]

    def here() -> SourcePosition:
        return SourcePosition(file, parser.CurrentLineNumber, parser.CurrentColumnNumber + 1)

    def start(tag: str, attributes: dict[str, str]) -> None:
        if len(opened) > MAX_DEPTH:
            raise here().error(f"'<{tag}>' nested too deeply", f"at most {MAX_DEPTH} levels")
        element = _Element(tag, attributes, here())
        opened[-1].items.append(element)
        opened.append(element)

    def refuse_dtd(*_: object) -> None:
        raise here().error("a DTD", "none: PML has no DTD and no entities")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: opened.pop()
    parser.CharacterDataHandler = lambda data: opened[-1].items.append(TextNode(data, at=here()))
    parser.StartDoctypeDeclHandler = refuse_dtd
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        inside = opened[-1]
        raise SourcePosition(file, error.lineno, error.offset + 1).error(
            f"{expat.ErrorString(error.code)} in <{inside.tag}> of line {inside.at.line}",
            "well-formed XML: in text write &lt; for < and &amp; for &, or put it into"
            " <![CDATA[...]]>",
        ) from None
    return cast(_Element, opened[0].items[0])


def _node(element: _Element) -> Any:
    """Convert an XML element of a schema to a syntax node."""
    tag, at, attributes = element.tag, element.at, element.attributes
    inside, needed, others = _SCHEMA[tag]
    for name in attributes:
        if name not in (needed, *others):
            raise at.error(f"attribute '{name}' of '<{tag}>'", one_of(name, (needed, *others)))
    name = attributes.get(needed, "")
    if needed and not name:
        raise at.error(f"'<{tag}>' without '{needed}'", f'{needed}="..."')
    if (tag == "module" and name in PML_TAGS) or (
        tag in ("module", "param", "parameter") and not is_name(name)
    ):
        raise at.error(f"name {name!r}", "a letter, then letters, digits or '-_.', but no PML tag")
    children = list[Any]()
    for child in element.items:
        if isinstance(child, _Element) and child.tag not in inside:
            raise child.at.error(
                f"'<{child.tag}>' in '<{tag}>'", f"{one_of(child.tag, inside)} there"
            )
        if "user" not in inside and isinstance(child, TextNode) and child.text.strip():
            raise child.at.error(
                f"text in '<{tag}>': {child.text.strip()[:40]!r}", "text in modules only"
            )
        children.append(child if isinstance(child, TextNode) else _node(child))
    items = joined(each for each in children if not isinstance(each, Scaffold))
    match tag:
        case "schema":
            return Schema(
                name, items, tuple(each for each in children if isinstance(each, Scaffold)), at=at
            )
        case "module":
            cache = attributes.get("cache", "true").lower()
            if cache not in ("true", "false"):
                raise at.error(f"cache='{cache}'", "'true' or 'false'")
            return Module(name, items, cache == "true", at=at)
        case "union":
            modules = tuple(each for each in items if isinstance(each, Module))
            return Union(modules, attributes.get("scaffold", ""), at=at)
        case "scaffold":
            return Scaffold(tuple(name.split()), at=at)
        case "param" | "parameter":
            length = attributes.get("len", attributes.get("length", ""))
            if not re.fullmatch(r"\s*\d{1,9}\s*", length):
                raise at.error(
                    f"len='{length}' of parameter '{name}'", "a number of tokens, such as '8'"
                )
            return Param(name, int(length), attributes.get("scaffold", ""), at=at)
        case _:
            return Role(cast(RoleName, tag), items, at=at)


def _imports(element: _Element) -> tuple[PromptItem, ...]:
    """Convert the content of a prompt element, or of an import element, to items."""

    def found() -> Iterator[PromptItem]:
        for child in element.items:
            if isinstance(child, TextNode):
                yield child
            elif child.tag in PML_ROLES and element.tag == "prompt":
                texts = [each for each in child.items if isinstance(each, TextNode)]
                if child.attributes or len(texts) < len(child.items):
                    raise child.at.error(
                        f"'<{child.tag}>' with attributes or tags", "only text in prompt messages"
                    )
                yield Role(cast(RoleName, child.tag), joined(texts), at=child.at)
            elif child.tag in PML_TAGS:
                wanted = "tags that name modules (messages belong directly in '<prompt>')"
                raise child.at.error(f"'<{child.tag}>' in '<{element.tag}>'", wanted)
            else:
                yield Import(
                    child.tag, tuple(child.attributes.items()), _imports(child), at=child.at
                )

    return joined(found())


NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot represent."""


def to_pml(node: Schema | PMLPrompt | Import | Scaffold | Item) -> str:
    """Return PML text that parses to an equal node; U+FFFD replaces characters that XML lacks."""
    return NO_TEXT.sub("\ufffd", whole_text(_written(node)))


def _written(node: Any) -> str:
    if isinstance(node, TextNode):
        return escape(node.text, {"\r": "&#13;"})
    tag, attributes, items = _parts_of(node)
    given = (
        attributes
        if isinstance(node, Import | PMLPrompt)
        else [pair for pair in attributes if pair[1]]
    )
    head = " ".join([tag, *(f"{name}={_quoted(value)}" for name, value in given)])
    inside = "".join(map(_written, items))
    return f"<{head}>{inside}</{tag}>" if inside else f"<{head}/>"


def _parts_of(node: Any) -> tuple[str, Iterable[tuple[str, str]], Iterable[Any]]:
    """Return the tag, attributes and items of a node."""
    match node:
        case Schema(name, items, scaffolds):
            return "schema", [("name", name)], (*items, *scaffolds)
        case Module(name, items, cache):
            return "module", [("name", name), ("cache", "" if cache else "false")], items
        case Union(modules, scaffold):
            return "union", [("scaffold", scaffold)], modules
        case Param(name, length, scaffold):
            return "param", [("name", name), ("len", str(length)), ("scaffold", scaffold)], ()
        case Scaffold(modules):
            return "scaffold", [("modules", " ".join(modules))], ()
        case Role(role, items):
            return role, (), items
        case Import(name, args, items):
            return name, args, items
        case PMLPrompt(schema, items, args):
            return "prompt", [("schema", schema), *args], items
    raise TypeError(f"{node!r} cannot be written as PML.")


def _quoted(value: str) -> str:
    return quoteattr(value, {"\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})
