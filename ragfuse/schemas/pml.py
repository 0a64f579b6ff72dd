"""The parser of PML, the Prompt Markup Language of schemas and prompts (Prompt Cache 3.2).

Errors carry file, line and column. The XML is read by expat of the standard library. For safety DTDs and processing
instructions are rejected, so only the five predefined and numeric entities exist and nothing is fetched, and size and
depth are limited. White space is kept as text; comments are dropped. `schemas/layout.py` assigns token positions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, cast
from xml.parsers import expat

from ragfuse.errors import PMLError
from ragfuse.schemas.nodes import (
    Import,
    MessageNode,
    Module,
    Param,
    PMLPrompt,
    Role,
    RoleName,
    Scaffold,
    Schema,
    SourcePosition,
    TextNode,
    Union,
    check_scope,
)
from ragfuse.schemas.pml_writer import to_pml
from ragfuse.text.mended import mended

__all__ = ["MAX_DEPTH", "MAX_ELEMENTS", "MAX_LENGTH", "MAX_PML_CHARS", "MAX_ROOM", "PML_ROLES", "PML_TAGS"]
__all__ += ["is_name", "one_of", "parse", "parse_prompt", "parse_schema", "read", "to_pml"]

MAX_PML_CHARS = 16_000_000
MAX_DEPTH = 64
MAX_ELEMENTS = 100_000
MAX_LENGTH = 1_000_000
MAX_ROOM = 1_000_000
"""Limits of one PML text: characters, nesting depth, elements, tokens of one parameter, tokens of all parameters."""

PML_ROLES = ("system", "user", "assistant")
PML_TAGS = frozenset({"schema", "prompt", "module", "union", "parameter", "param", "scaffold", *PML_ROLES})
"""Reserved tags, which cannot be names of modules."""

_PARTS = frozenset({"module", "union", "parameter", "param", *PML_ROLES})
_INSIDE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "schema": _PARTS | {"scaffold"},
        "module": _PARTS,
        "union": frozenset({"module"}),
        **dict.fromkeys(PML_ROLES, _PARTS - set(PML_ROLES)),
        **dict.fromkeys(("parameter", "param", "scaffold"), frozenset[str]()),
    }
)
_ATTRIBUTES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "schema": ("name",),
        "module": ("name", "cache"),
        "union": ("scaffold",),
        "scaffold": ("modules",),
        **dict.fromkeys(PML_ROLES, ()),
        **dict.fromkeys(("parameter", "param"), ("name", "len", "length", "scaffold")),
    }
)
_LINE_END = re.compile(r"\r\n?|\n")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_HELP = "well-formed XML: in text write &lt; for < and &amp; for &, or put it into <![CDATA[...]]>"


def parse(text: str, file: str = "") -> Schema | PMLPrompt:
    """Parse a PML text into a schema or a prompt.

    Args:
        text: The PML.
        file: Its name, for error messages.

    Raises:
        PMLError: The text cannot be parsed; the error carries the place.
    """
    return _Reader(mended(text, file or "A text in PML"), file).read()


def parse_schema(text: str, file: str = "") -> Schema:
    """Parse a PML text that must be a schema; PMLError otherwise."""
    found = parse(text, file)
    if not isinstance(found, Schema):
        raise found.at.error("<prompt>", "<schema>")
    return found


def parse_prompt(text: str, file: str = "") -> PMLPrompt:
    """Parse a PML text that must be a prompt; PMLError otherwise."""
    found = parse(text, file)
    if not isinstance(found, PMLPrompt):
        raise found.at.error("<schema>", "<prompt>")
    return found


def read(path: str | Path) -> Schema | PMLPrompt:
    """Parse a PML file in UTF-8, as `parse` does; PMLError also if the file cannot be read."""
    try:
        data = Path(path).read_bytes()
        return parse(data.decode(), str(path))
    except OSError as error:
        raise PMLError(f"no readable file ({error.strerror})", "a schema or prompt in PML", str(path)) from error
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise PMLError(f"invalid byte {data[error.start]:#04x}", "text in UTF-8", str(path), line, column) from error


def is_name(name: str) -> bool:
    """Whether a text is a valid name of a module or parameter: an XML name without a colon."""
    if _PLAIN_NAME.fullmatch(name):
        return True
    if not name or name.isascii() or not name.isprintable():
        return False
    seen: list[str] = []
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = lambda tag, _: seen.append(tag)
    try:
        parser.Parse(f"<{name}/>".encode(), True)
    except (expat.ExpatError, UnicodeEncodeError):
        return False
    return seen == [name] and ":" not in name


def one_of(name: str, names: Iterable[str]) -> str:
    """Return the valid names as text for an error message: those similar to `name`, else the first eight."""
    known = sorted({each for each in names if each and len(each) <= 100})
    close = difflib.get_close_matches(name, known[:1000], 3, 0.6) if len(name) <= 100 else []
    shown = close or known[:8]
    more = ", ..." if not close and len(known) > len(shown) else ""
    listed = ", ".join(f"'{each}'" for each in shown) + more
    return f"one of {listed}" if len(shown) > 1 else listed or "none"


@dataclass(slots=True)
class _Frame:
    """An element that is still open."""

    tag: str
    attributes: dict[str, str]
    at: SourcePosition
    items: list[Any] = field(default_factory=list)
    scaffolds: list[Scaffold] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    text_at: SourcePosition | None = None


class _Reader:
    """A parser of one PML text; use it once."""

    def __init__(self, text: str, file: str) -> None:
        self._text, self._file = text, file
        self._open: list[_Frame] = []
        self._count, self._in_role, self._room = 0, 0, 0
        self._found: Schema | PMLPrompt | None = None
        self._parser = parser = expat.ParserCreate("utf-8")
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = lambda *_: self._refuse("a DTD", "none: PML has no DTD and no entities")
        parser.ProcessingInstructionHandler = lambda *_: self._refuse("a processing instruction", "PML's own tags")

    def read(self) -> Schema | PMLPrompt:
        """Parse the text and return its root node."""
        if len(self._text) > MAX_PML_CHARS:
            raise PMLError(f"{len(self._text)} characters", f"at most {MAX_PML_CHARS}", self._file)
        try:
            self._parser.Parse(self._text.encode(), True)
        except expat.ExpatError as error:
            raise self._malformed(error) from None
        assert self._found is not None  # expat: no element found
        return self._found

    def _malformed(self, error: expat.ExpatError) -> PMLError:
        at = SourcePosition(self._file, error.lineno, error.offset + 1)
        what = expat.ErrorString(error.code)
        if error.code == expat.errors.codes[expat.errors.XML_ERROR_TAG_MISMATCH] and self._open:
            last = self._open[-1]
            return at.error(f"the wrong closing tag ({what})", f"'</{last.tag}>' first, for line {last.at.line}")
        line = _LINE_END.split(self._text, error.lineno)[error.lineno - 1] if error.lineno else ""
        return at.error(f"{what} in {line[max(0, error.offset - 30) : error.offset + 30].strip()!r}", _HELP)

    def _here(self) -> SourcePosition:
        return SourcePosition(self._file, self._parser.CurrentLineNumber, self._parser.CurrentColumnNumber + 1)

    def _refuse(self, found: str, wanted: str) -> NoReturn:
        raise self._here().error(found, wanted)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if self._count > MAX_ELEMENTS:
            self._refuse(f"more than {MAX_ELEMENTS} elements", "fewer")
        if len(self._open) >= MAX_DEPTH:
            self._refuse(f"'<{tag}>' nested in {MAX_DEPTH} elements", "less nesting")
        at = self._here()
        if not self._open and tag not in ("schema", "prompt"):
            raise at.error(f"'<{tag}>'", "'<schema>' or '<prompt>'")
        if self._open:
            if tag != "scaffold":  # a scaffold is not an item and does not split the text around it
                self._take_text(self._open[-1])
            self._check(tag, attributes, at)
        self._in_role += tag in PML_ROLES
        self._open.append(_Frame(tag, attributes, at))

    def _check(self, tag: str, attributes: dict[str, str], at: SourcePosition) -> None:
        """Raise PMLError for an element that is not allowed inside its parent."""
        parent = self._open[-1].tag
        if self._open[0].tag == "prompt":
            if parent in PML_ROLES:
                raise at.error(f"'<{tag}>' in '<{parent}>'", "only text in a message of a prompt")
            if tag in PML_TAGS and not (tag in PML_ROLES and parent == "prompt"):
                raise at.error(f"'<{tag}>' in '<{parent}>'", "modules to import; messages only directly in '<prompt>'")
            return
        if tag not in _INSIDE[parent]:
            raise at.error(f"'<{tag}>' in '<{parent}>'", f"{one_of(tag, _INSIDE[parent])} there")
        if tag in PML_ROLES and self._in_role:
            raise at.error(f"'<{tag}>' in another message", "messages next to each other, not nested")

    def _characters(self, text: str) -> None:
        frame = self._open[-1]
        if frame.text_at is None:
            frame.text_at = self._here()
        frame.text.append(text)

    def _take_text(self, frame: _Frame) -> None:
        """Add the text since the last item as an item of its own."""
        if frame.text_at is None:
            return
        text = TextNode("".join(frame.text), frame.text_at)
        frame.text, frame.text_at = [], None
        if frame.tag in ("union", "parameter", "param", "scaffold"):
            if text.text.strip():
                raise text.at.error(f"text in '<{frame.tag}>': {text.text.strip()[:40]!r}", "text in modules only")
        else:
            frame.items.append(text)

    def _end(self, tag: str) -> None:
        frame = self._open[-1]
        self._take_text(frame)
        self._in_role -= tag in PML_ROLES
        derived = self._open[0].tag == "prompt"
        node: Any = _derived(frame) if derived else _MAKE[frame.tag](frame)
        if isinstance(node, Param):
            self._room += node.length
            if self._room > MAX_ROOM:
                raise node.at.error(f"parameters of {self._room} tokens in all", f"at most {MAX_ROOM} in a schema")
        self._open.pop()
        if isinstance(node, Scaffold):
            self._open[-1].scaffolds.append(node)
        elif self._open:
            self._open[-1].items.append(node)
        else:
            self._found = node


def _take(frame: _Frame, needed: str = "") -> dict[str, str]:
    """Return the attributes of an element; PMLError for an unknown one, or if the `needed` one is missing or empty."""
    known = _ATTRIBUTES[frame.tag]
    for name in frame.attributes:
        if name not in known:
            raise frame.at.error(f"attribute '{name}' of '<{frame.tag}>'", one_of(name, known))
    if needed and not frame.attributes.get(needed):
        raise frame.at.error(f"'<{frame.tag}>' without '{needed}'", f'{needed}="..."')
    return frame.attributes


def _name(frame: _Frame) -> str:
    """Return the checked name of a module or parameter, which prompts write as a tag or an attribute."""
    name = _take(frame, "name")["name"]
    if not is_name(name):
        raise frame.at.error(f"name {name!r}", "a name that XML allows: letters, digits, '-', '_', '.'")
    return name


def _module(frame: _Frame) -> Module:
    name, cache = _name(frame), frame.attributes.get("cache", "true")
    if name in PML_TAGS:
        raise frame.at.error(f"a module called '{name}'", "another name, as PML has a tag of this name")
    if cache.lower() not in ("true", "false"):
        raise frame.at.error(f"cache={cache!r}", "'true' or 'false'")
    check_scope(tuple(frame.items))
    return Module(name, tuple(frame.items), cache.lower() == "true", frame.at)


def _param(frame: _Frame) -> Param:
    name, lengths = _name(frame), [frame.attributes[name] for name in ("len", "length") if name in frame.attributes]
    if len(lengths) != 1:
        raise frame.at.error(
            f"parameter '{name}' with {len(lengths)} lengths", "exactly one of len and length, in tokens"
        )
    if not re.fullmatch(r"[0-9]{1,7}", lengths[0].strip()) or not 1 <= int(lengths[0]) <= MAX_LENGTH:
        raise frame.at.error(f"length {lengths[0]!r} of parameter '{name}'", f"1 to {MAX_LENGTH} tokens")
    return Param(name, int(lengths[0]), frame.attributes.get("scaffold", ""), frame.at)


def _scaffold(frame: _Frame) -> Scaffold:
    return Scaffold(tuple(_take(frame, "modules")["modules"].split()), frame.at)


def _schema(frame: _Frame) -> Schema:
    name = _take(frame, "name")["name"]
    check_scope(tuple(frame.items))
    return Schema(name, tuple(frame.items), tuple(frame.scaffolds), frame.at)


def _union(frame: _Frame) -> Union:
    return Union(tuple(frame.items), _take(frame).get("scaffold", ""), frame.at)


def _role(frame: _Frame) -> Role:
    _take(frame)
    return Role(cast(RoleName, frame.tag), tuple(frame.items), frame.at)


_MAKE: Mapping[str, Callable[[_Frame], Any]] = MappingProxyType(
    {
        "schema": _schema,
        "module": _module,
        "union": _union,
        "scaffold": _scaffold,
        **dict.fromkeys(("parameter", "param"), _param),
        **dict.fromkeys(PML_ROLES, _role),
    }
)


def _derived(frame: _Frame) -> PMLPrompt | Import | MessageNode:
    """Return the node of an element inside a prompt."""
    if frame.tag in PML_ROLES:
        for name in frame.attributes:
            raise frame.at.error(f"attribute '{name}' of '<{frame.tag}>'", "none")
        return MessageNode(cast(RoleName, frame.tag), "".join(text.text for text in frame.items), frame.at)
    if frame.tag != "prompt":
        return Import(frame.tag, tuple(frame.attributes.items()), tuple(frame.items), frame.at)
    schema = frame.attributes.get("schema")
    if not schema:
        raise frame.at.error("'<prompt>' without 'schema'", 'schema="..."')
    args = tuple((name, value) for name, value in frame.attributes.items() if name != "schema")
    return PMLPrompt(schema, tuple(frame.items), args, frame.at)
