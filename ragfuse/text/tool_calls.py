"""Tool calls in text: the format in which a model writes them, its grammar, and the parser.

The format is that of the chat template (`text/call_formats.py`), or `DEFAULT_CALL_FORMAT` if it has
none. Callers decide which tools there are and whether they must be called.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.types.answer import ToolCall
from ragfuse.types.keys import digest
from ragfuse.types.partial_match import partial_match

Slot = Literal["name", "arguments", "id"]
Schemas = Mapping[str, str]
"""The JSON schema of each tool's arguments, as JSON text, by the tool's name."""
MAX_SPACE_CHARS = 4096
"""The most characters of white space before a call that are skipped."""
MAX_SCHEMA_DEPTH = 16
"""The most nested references and unions that are followed."""


@dataclass(frozen=True)
class Pairs:
    """A format of arguments that are written one by one, not as one JSON object.

    Strings are written literally, all other values as JSON.

    Args:
        before: Text before a name.
        between: Text between a name and its value.
        after: Text after a value.
    """

    before: str
    between: str
    after: str

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return all arguments as text."""
        return "".join(
            f"{self.before}{name}{self.between}{_as_text(value)}{self.after}"
            for name, value in arguments.items()
        )

    def read(
        self, text: str, at: int, schema: Mapping[str, Any], behind: re.Pattern[str]
    ) -> tuple[dict[str, Any], int]:
        """Parse arguments from `at` on; return them and where they end. `behind` matches what
        follows the last one.
        """
        found: dict[str, Any] = {}
        before, after = _pattern(self.before).pattern, _pattern(self.after).pattern
        named = re.compile(rf"{before}\s*([^\n<>]+?)\s*{_pattern(self.between).pattern}")
        follows = f"(?={before}|{behind.pattern})"
        ends = [re.compile(f"{each}{follows}") for each in (re.escape(self.after), rf"{after}\s*")]
        space = self.between[len(self.between.rstrip()) :]
        while name := named.match(text, at):
            start = name.end() + len(space) * text.startswith(space, name.end())
            value_end = min(
                (end for each in ends if (end := each.search(text, start))),
                key=re.Match.end,
                default=None,
            )
            if value_end is None:
                break
            found[name[1]] = _value(text[start : value_end.start()], name[1], schema)
            at = value_end.end()
        return found, at


@dataclass(frozen=True)
class CallFormat:
    """The text format of tool calls: `head`, the slots of a call with `inner` between them, `again`
    and more, `tail`.

    Args:
        head: Text before the first call's slots.
        inner: Texts between the slots.
        again: Text between two calls; None: an answer holds one call only.
        tail: Text after the last call.
        marker: Text that begins a call and nothing else; "": calls are bare JSON, and an answer
            that begins with the first letter of `head` (`opener`) is a call.
        slots: The order of name, arguments and id.
        native: The chat template writes calls itself.
        as_text: The template takes arguments as JSON text, not as an object.
        id_size: Length of the call ids that the template takes; 0: any, and none is written.
        pairs: The format of arguments that are not one JSON object.
        lead: A token that a model may write before bare JSON; "": none.
    """

    head: str
    inner: tuple[str, ...]
    again: str | None
    tail: str
    marker: str
    slots: tuple[Slot, ...] = ("name", "arguments")
    native: bool = False
    as_text: bool = False
    id_size: int = 0
    pairs: Pairs | None = None
    lead: str = ""

    @property
    def opener(self) -> str:
        """The first letter of a call."""
        return self.head.lstrip()[:1]

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the format around names, arguments and ids."""
        pairs = (
            (self.pairs.before, self.pairs.between, self.pairs.after)
            if self.pairs is not None
            else ()
        )
        return (self.lead, self.head, *self.inner, self.again or "", self.tail, *pairs)

    def opens(self, text: str, lo: int = 0, seen: int = 0) -> int:
        """Return where the first call in text[lo:] begins, with the white space before it; -1 if
        there is none.

        The first `seen` characters were searched before without finding one.
        """
        if self.marker:
            at = text.find(self.marker, max(lo, seen - len(self.marker) + 1))
            return at if at < 0 else stripped_end(text, lo, at)
        return (
            lo
            if _pattern(self.lead + self.head).match(text, lo)
            or _pattern(self.head).match(text, lo)
            else -1
        )

    def undecided(self, text: str, lo: int = 0) -> int:
        """Return how many characters at the end of text[lo:], which has no call yet, may become
        part of one.
        """
        if self.marker:
            start = len(text) - partial_match(
                text[max(lo, len(text) - len(self.marker) + 1) :], (self.marker,)
            )
            return len(text) - stripped_end(text, lo, start)
        begun = text[lo : lo + MAX_SPACE_CHARS].lstrip()
        is_lead = self.lead and self.lead.startswith(begun[: len(self.lead)])
        return len(text) - lo if not begun or begun[0] == self.opener or is_lead else 0

    def one(self, text: str, at: int, schemas: Schemas) -> tuple[ToolCall | None, int]:
        """Parse the call whose slots begin at `at`.

        Returns:
            The call and where its last slot ends; (None, -1) if it is invalid or incomplete.
        """
        found: dict[str, Any] = {}
        value: Any = None
        for slot, after in zip(self.slots, (*self.inner, ""), strict=True):
            if slot == "arguments":
                value, at = self._arguments_at(text, at, found.get("name", ""), schemas)
            else:
                name = r"\s*([\w.-]+)" if self.pairs else r"([^\s\"\\{}<>\[\]()]+)"
                match = re.compile(name if slot == "name" else f"(.{{{self.id_size}}})").match(
                    text, at
                )
                value, at = (match[1], match.end()) if match else (None, at)
            passed = _pattern(after).match(text, at)
            if value is None or passed is None:
                return None, -1
            found[slot], at = value, passed.end()
        return ToolCall(found["name"], found["arguments"], call_id()), at

    def _arguments_at(
        self, text: str, at: int, name: str, schemas: Schemas
    ) -> tuple[dict[str, Any] | None, int]:
        if self.pairs is None:
            try:
                value, end = json.JSONDecoder().raw_decode(
                    text, at + len(text[at:]) - len(text[at:].lstrip())
                )
            except (ValueError, RecursionError):  # no JSON, or nested too deeply
                return None, at
            return (value, end) if isinstance(value, dict) else (None, at)
        behind = _pattern(self._call_end) if self._call_end else re.compile(r"\s*\Z")
        found, end = self.pairs.read(text, at, json.loads(schemas.get(name, "{}")), behind)
        return (found, end) if behind.match(text, end) else (None, at)

    @property
    def _call_end(self) -> str:
        """The text that follows the last slot of every call, whether another call comes after it or
        none.
        """
        return self.tail if self.again is None else _shared(self.tail, self.again)

    def rules(
        self,
        schemas: Schemas,
        literal: Callable[[str], str],
        free: bool = False,
        several: bool = True,
        tags: Sequence[str] = (),
        form: str = "",
    ) -> str:
        """Return the Lark grammar of an answer that calls these tools.

        Args:
            schemas: The tools.
            literal: Writes a required text as a Lark literal.
            free: The answer may also be any text that begins no call.
            several: The answer may hold several calls.
            tags: Tags that free text may contain, such as those around thoughts.
            form: The JSON schema of an answer that calls none; "": free text.
        """
        again = self.again if several else None
        shared = _shared(self.tail, again) if again is not None else self.tail
        one = " | ".join(f"call_{at}" for at in range(len(schemas)))
        first = (
            f"start: %json {form} | {literal(self.head.lstrip())} calls"
            if form
            else self._start(literal, free, tags)
        )
        lines = [first, f"one: ({one}) {literal(shared)}"]
        more = f"({literal(again[len(shared) :])} one)*" if again is not None else ""
        lines.append(f"calls: one {more} {literal(self.tail[len(shared) :])}")
        for at, (name, schema) in enumerate(schemas.items()):
            lines.append(f"call_{at}: {' '.join(self._terms(name, schema, f'args_{at}', literal))}")
            if self.pairs is not None:
                lines += _pair_rules(self.pairs, f"args_{at}", json.loads(schema), literal)
        return "\n".join(lines) + "\n"

    def _start(self, literal: Callable[[str], str], free: bool, tags: Sequence[str]) -> str:
        if not free:
            return f"start: {literal(self.head)} calls"
        rest = literal(self.head.lstrip()[len(self.marker) :])
        before = _before(literal, tags)
        if not self.marker:
            lead = f"({literal(self.lead)})? " if self.lead else ""
            return (
                f"start: {before}(TEXT | {lead}{rest} calls)\nTEXT:"
                f" /\\s*([^{_escaped(self.opener)}\\s](.|\\n)*)?/"
            )
        mark = literal(self.marker)
        # a token; text that spells it letter by letter would be parsed as a call
        if mark.startswith("<["):
            return (
                f"start: {before}(TEXT | TEXT {mark} {rest} calls)\nTEXT: /(.|\\n)*/ &"
                f" ~{_containing(self.marker)}"
            )
        return (
            f"start: {before}(TEXT | opened {rest} calls)\nopened[lazy]: TEXT {mark}\nTEXT:"
            " /(.|\\n)*/"
        )

    def _terms(
        self, name: str, schema: str, arguments: str, literal: Callable[[str], str]
    ) -> Iterator[str]:
        for slot, after in zip(self.slots, (*self.inner, ""), strict=True):
            if slot == "name":
                yield literal(name)
            elif slot == "arguments":
                yield f"%json {schema}" if self.pairs is None else arguments
            else:
                yield f"/[a-zA-Z0-9]{{{self.id_size}}}/"
            yield literal(after)

    def message(self, turn: ChatMessage) -> dict[str, Any]:
        """Return a message as chat templates take it."""
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.tool_calls:
            message["tool_calls"] = []
        for call in turn.tool_calls:
            given = (
                json.dumps(call.arguments, ensure_ascii=False) if self.as_text else call.arguments
            )
            function = {"name": call.name, "arguments": given}
            message["tool_calls"].append(
                {"type": "function", "id": self._id(call.id), "function": function}
            )
        if turn.tool_call_id:
            message["tool_call_id"] = self._id(turn.tool_call_id)
        if turn.name:
            message["name"] = turn.name
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        return message

    def _id(self, id: str) -> str:
        """Return an id of the length that the template takes; equal ids give equal results."""
        return (
            digest("call", id)[: self.id_size] if self.id_size and len(id) != self.id_size else id
        )

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as text in this format."""
        texts = [self._written(call) for call in calls]
        return self.head + (self.again or "").join(texts) + self.tail if texts else ""

    def _written(self, call: ToolCall) -> str:
        as_json = json.dumps(dict(call.arguments), ensure_ascii=False)
        arguments = as_json if self.pairs is None else self.pairs.write(call.arguments)
        slot_texts = {"name": call.name, "arguments": arguments, "id": self._id(call.id)}
        return "".join(
            slot_texts[slot] + after
            for slot, after in zip(self.slots, (*self.inner, ""), strict=True)
        )


class CallReader:
    """An incremental parser of the calls in a growing answer; calls parsed before are not parsed
    again.

    Attributes:
        calls: The calls so far, without repetitions.
        repeats: Whether a call repeated an earlier one, which a small model may do forever.
    """

    def __init__(self, format: CallFormat, schemas: Schemas = MappingProxyType({})) -> None:
        self.calls: tuple[ToolCall, ...] = ()
        self.repeats = False
        self._format, self._schemas = format, schemas
        self._at = -1

    def read(self, text: str, opening: int) -> tuple[ToolCall, ...]:
        """Return all complete calls of a text whose first call begins at `opening`."""
        lead, head = _pattern(self._format.lead).pattern, _pattern(self._format.head).pattern
        first = re.compile(f"(?:{lead})?{head}").match(text, opening)
        while start := first if self._at < 0 else self._next(text):
            call, end = self._format.one(text, start.end(), self._schemas)
            if call is None:
                break
            self._at = end
            if any(
                call.name == other.name and call.arguments == other.arguments
                for other in self.calls
            ):
                self.repeats = True
            else:
                self.calls += (call,)
        return self.calls

    def _next(self, text: str) -> re.Match[str] | None:
        return (
            None
            if self._format.again is None
            else _pattern(self._format.again).match(text, self._at)
        )


DEFAULT_CALL_FORMAT = CallFormat(
    head='<tool_call>{"name": "',
    inner=('", "arguments": ',),
    again='}</tool_call>\n<tool_call>{"name": "',
    tail="}</tool_call>",
    marker="<tool_call>",
)
"""The format for models whose chat template does not support tools."""


def call_id() -> str:
    """Return a new random call id."""
    return f"call_{secrets.token_hex(12)}"


def spelled(turns: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Rewrite a conversation for chat templates without tools: tools, calls and results become
    plain text.

    The text has the form of `DEFAULT_CALL_FORMAT`. Each message's content must be a tuple of
    `Piece`; chunks in a tool's result stay chunks.
    """
    messages = [_spelled(turn) for turn in turns]
    if tools:
        text = Piece(_described(tools))
        if messages and messages[0].role == "system":
            messages[0] = replace(messages[0], content=(*messages[0].content, Piece("\n\n"), text))
        else:
            messages.insert(0, ChatMessage("system", (text,)))
    return ChatMessage.joined(messages) if any(turn.role == "tool" for turn in turns) else messages


def _described(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        'You can call tools. A call is written as <tool_call>{"name": name, "arguments":'
        " {...}}</tool_call>, several of them one below the other; their results come as"
        f" <tool_response>. These are the tools:\n{lines}"
    )


def _spelled(turn: ChatMessage) -> ChatMessage:
    if turn.tool_calls:
        gap = (Piece("\n"),) if turn.content else ()
        pieces = (*turn.content, *gap, Piece(DEFAULT_CALL_FORMAT.write(turn.tool_calls)))
        return ChatMessage(turn.role, pieces, reasoning=turn.reasoning)
    if turn.role == "tool":
        return ChatMessage(
            "user", (Piece("<tool_response>\n"), *turn.content, Piece("\n</tool_response>"))
        )
    return turn


def _shared(one: str, other: str) -> str:
    """Return the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def stripped_end(text: str, lo: int, hi: int) -> int:
    """Return the end of text[lo:hi] without the white space at its end."""
    last = text[max(lo, hi - MAX_SPACE_CHARS) : hi]
    return hi - (len(last) - len(last.rstrip()))


def _escaped(text: str) -> str:
    """Return a regular expression of exactly this text, which is also valid inside a character
    class.
    """
    return "".join(f"\\x{{{ord(letter):x}}}" for letter in text)


def _pattern(text: str) -> re.Pattern[str]:
    """Return a pattern that matches a text of the format with any white space between and before
    its words.
    """
    words = [re.escape(word) for word in text.split()]
    inner = r"\s*".join(words)
    return re.compile(rf"\s*{inner}") if words else re.compile("")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_PYTHON_VALUES: Mapping[str, Any] = MappingProxyType({"True": True, "False": False, "None": None})
"""Values as Python writes them; some templates do so."""


def _value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Return a text as a value that the schema allows as the argument of this name; otherwise the
    text itself.
    """
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    known = (schema.get("properties") or {}).get(name, {})
    try:
        value = _PYTHON_VALUES[text.strip()] if text.strip() in _PYTHON_VALUES else json.loads(text)
        fits = not isinstance(value, str) and Draft202012Validator(schema).evolve(
            schema=known
        ).is_valid(value)
    # no JSON, nested too deeply, or a pattern that Python does not read
    except (ValueError, RecursionError, re.error):
        return text
    return value if fits else text


def _types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows; empty if it allows any, or does not tell."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return frozenset()
    if isinstance(ref := schema.get("$ref"), str):
        found: Any = root
        for name in ref.removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        return _types_of(found, root, depth + 1)
    if types := schema.get("type"):
        return frozenset([types] if isinstance(types, str) else types)
    parts = [
        _types_of(each, root, depth + 1)
        for name in ("anyOf", "oneOf")
        for each in schema.get(name, ())
    ]
    return frozenset().union(*parts) if all(parts) else frozenset()


def _pair_rules(
    pairs: Pairs, name: str, schema: Mapping[str, Any], literal: Callable[[str], str]
) -> Iterator[str]:
    """Yield Lark rules of arguments that are written one by one, in the order of their schema."""
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    if not properties and schema.get("additionalProperties", True) is not False:
        yield (
            f"{name}: ({literal(pairs.before)} /[a-zA-Z_][a-zA-Z0-9_.-]*/ {literal(pairs.between)}"
            f" {name}_any)*"
        )
        yield from _value_rules(pairs.after, f"{name}_any", {}, schema, literal)
        return
    rule_names = (
        f"{name}_{at}" + ("" if key in required else "?") for at, key in enumerate(properties)
    )
    yield f"{name}: {' '.join(rule_names)}"
    for at, (key, value) in enumerate(properties.items()):
        yield f"{name}_{at}: {literal(pairs.before + key + pairs.between)} {name}_{at}_value"
        yield from _value_rules(pairs.after, f"{name}_{at}_value", value, schema, literal)


def _value_rules(
    after: str, name: str, schema: Any, root: Mapping[str, Any], literal: Callable[[str], str]
) -> Iterator[str]:
    """Yield Lark rules of one value and the text after it. A string is literal and ends where that
    text begins.
    """
    types, fields = _types_of(schema, root), schema if isinstance(schema, Mapping) else {}
    values = fields.get("enum", [fields["const"]] if "const" in fields else None)
    if values:
        choices = " | ".join(json.dumps(_as_text(value)) for value in values)
        yield f"{name}: ({choices}) {literal(after)}"
    elif types == {"boolean"}:
        yield f'{name}: ("true" | "false" | "True" | "False") {literal(after)}'
    elif types and "string" not in types:
        shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
        yield f"{name}: %json {json.dumps({**shared, **fields})} {literal(after)}"
    else:
        yield from _text_rules(after, name, fields, literal)


def _text_rules(
    after: str, name: str, schema: Mapping[str, Any], literal: Callable[[str], str]
) -> Iterator[str]:
    min_chars, max_chars = schema.get("minLength", 0), schema.get("maxLength", "")
    any_text = f"(.|\\n){{{min_chars},{max_chars}}}" if min_chars or max_chars != "" else "(.|\\n)*"
    cut = next((at for at in range(len(after)) if literal(after[at:]).startswith("<[")), None)
    text = f"{name.upper()}_TEXT"
    if cut is None:
        yield f"{name}[lazy]: {text} {literal(after)}"
        yield f"{text}: /{any_text}/"
        return
    # The end is a token, and the value must not contain its letters: spelled out, they would end
    # the value.
    sizes = range(1, len(after) - cut + 1)
    mark = next(
        after[cut : cut + size]
        for size in sizes
        if _TOKEN_LITERAL.fullmatch(literal(after[cut : cut + size]))
    )
    yield f"{name}: {text} {literal(after[cut:])}"
    yield f"{text}: /{any_text}{_escaped(after[:cut])}/ & ~{_containing(mark)}"


_TOKEN_LITERAL = re.compile(r"<\[[0-9]+\]>")


def _before(literal: Callable[[str], str], tags: Sequence[str]) -> str:
    """Return the rule of texts that each end in a tag; a tag that is not one token is matched by
    TEXT already.
    """
    tag_tokens = [mark for mark in map(literal, tags) if _TOKEN_LITERAL.fullmatch(mark)]
    return f"(TEXT ({' | '.join(tag_tokens)}))* " if tag_tokens else ""


def _containing(text: str) -> str:
    """Return a Lark regular expression of all texts that contain this one."""
    return f"/(.|\\n)*{_escaped(text)}(.|\\n)*/"
