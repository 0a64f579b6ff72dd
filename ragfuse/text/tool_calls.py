"""Tool calls as text: formats in which models write calls, each with a grammar and a parser.

The chat template determines the format (`text/chat_template.py`). If the template does not support
tools, the format is `DEFAULT_CALL_FORMAT`. Callers choose the tools and whether a call is required.
The grammar allows the model to write only this format, so the parser accepts no other format.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal

from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.types.answer import ToolCall
from ragfuse.types.keys import digest
from ragfuse.types.texts import partial_match

Slot = Literal["name", "arguments", "id"]
Schemas = Mapping[str, str]
"""The JSON schema of each tool's arguments, as JSON text, by the tool's name."""
MAX_SPACE_CHARS = 4096
"""Maximum number of white-space characters that are skipped before a call."""
_NAME = re.compile(r"[\w.-]+")
"""The name of a tool, or the id of a call."""


@dataclass(frozen=True)
class Pairs:
    """The format of arguments that are written one by one, not as one JSON object.

    Args:
        before: Text before an argument's name.
        between: Text between an argument's name and value.
        after: Text after an argument's value.
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

    def read(self, text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Parse the arguments that begin at index `at`. Return the arguments and the index after
        the last argument.
        """
        found: dict[str, Any] = {}
        ends = map(re.escape, astuple(self))
        pair = re.compile("{}(.*?){}(.*?){}".format(*ends), re.DOTALL)
        while match := pair.match(text, at):
            found[match[1]], at = _value(match[2], match[1], schema), match.end()
        return found, at


@dataclass(frozen=True)
class CallFormat:
    """The text format of tool calls: `head`, the first call's slots, `end`, and `tail`.

    The slots of a call are its name, arguments and, in some formats, id, separated by `inner`.
    Each further call inserts `again`, its slots and `end` before `tail`.

    Args:
        head: Text before the first call's slots.
        inner: Texts between the slots of a call.
        end: Text after the slots of every call.
        again: Text between one call's `end` and the next call's slots. None if an answer can have
            only one call.
        tail: Text after the `end` of the last call.
        marker: Text that occurs only at the start of a call. "" if calls are bare JSON. Without a
            marker, an answer that begins with the first character of `head` must be a call.
        slots: The order of name, arguments and id.
        as_text: True if the template takes arguments as JSON text, not as an object.
        id_size: Length of the call ids that the template requires. 0 if any length is allowed.
        pairs: The format of arguments written one by one. None if they are one JSON object.
        lead: A token that a model may write before bare JSON. "" for none.
    """

    head: str
    inner: tuple[str, ...]
    end: str
    again: str | None
    tail: str
    marker: str
    slots: tuple[Slot, ...] = ("name", "arguments")
    as_text: bool = False
    id_size: int = 0
    pairs: Pairs | None = None
    lead: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All literal texts of the format."""
        pairs = astuple(self.pairs) if self.pairs is not None else ()
        return (self.lead, self.head, *self.inner, self.end, self.again or "", self.tail, *pairs)

    def opens(self, text: str, lo: int = 0) -> int:
        """Return the start of the white space before the first call in text[lo:], or -1."""
        if self.marker:
            at = text.find(self.marker, lo)
            return at if at < 0 else stripped_end(text, lo, at)
        begun = text[lo : lo + MAX_SPACE_CHARS].lstrip().removeprefix(self.lead)
        return lo if begun.startswith(self.head) else -1

    def undecided(self, text: str, lo: int = 0) -> int:
        """Return how many characters at the end of text[lo:] may become part of a call."""
        if self.marker:
            start = len(text) - partial_match(
                text[max(lo, len(text) - len(self.marker) + 1) :], (self.marker,)
            )
            return len(text) - stripped_end(text, lo, start)
        begun = text[lo : lo + MAX_SPACE_CHARS].lstrip()
        is_lead = self.lead and self.lead.startswith(begun[: len(self.lead)])
        return len(text) - lo if not begun or begun[0] == self.head[0] or is_lead else 0

    def one(self, text: str, at: int, schemas: Schemas) -> tuple[ToolCall | None, int]:
        """Parse a call whose slots begin at `at`. Return (call, end). (None, -1) if incomplete."""
        found: dict[str, Any] = {}
        for slot, after in zip(self.slots, (*self.inner, self.end), strict=True):
            if slot != "arguments":
                match = _NAME.match(text, at)
                found[slot], at = (match[0], match.end()) if match else ("", at)
            elif self.pairs is not None:
                schema = json.loads(schemas.get(found["name"], "{}"))
                found[slot], at = self.pairs.read(text, at, schema)
            else:
                try:
                    found[slot], at = json.JSONDecoder().raw_decode(text, at)
                except ValueError:
                    return None, -1
            if not text.startswith(after, at):
                return None, -1
            at += len(after)
        return ToolCall(found["name"], found["arguments"], call_id()), at

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
            schemas: The JSON schemas of the tools' arguments.
            literal: Converts a required text to a Lark literal.
            free: True if the answer may also be text without a call.
            several: True if the answer may contain several calls.
            tags: Tags that free text may contain, such as reasoning tags.
            form: The JSON schema of an answer without calls. "" for free text.
        """
        one = " | ".join(f"call_{at}" for at in range(len(schemas)))
        again = self.again if several else None
        more = f"({literal(again)} one)*" if again is not None else ""
        lines = [
            *(
                [f"start: %json {form} | {literal(self.head)} calls"]
                if form
                else self._start(literal, free, tags)
            ),
            f"one: ({one}) {literal(self.end)}",
            f"calls: one {more} {literal(self.tail)}",
        ]
        for at, (name, schema) in enumerate(schemas.items()):
            lines.append(f"call_{at}: {' '.join(self._terms(name, schema, f'args_{at}', literal))}")
            if self.pairs is not None:
                lines += _pair_rules(self.pairs, f"args_{at}", json.loads(schema), literal)
        return "\n".join(lines) + "\n"

    def _start(
        self, literal: Callable[[str], str], free: bool, tags: Sequence[str]
    ) -> Iterator[str]:
        rest = literal(self.head[len(self.marker) :])
        # a tag that is not a single token is matched by the text rule itself
        tag_tokens = [mark for mark in map(literal, tags) if mark.startswith("<[")]
        before = f"(OPENED_TEXT ({' | '.join(tag_tokens)}))* " if tag_tokens else ""
        if not free:
            yield f"start: {literal(self.head)} calls"
        elif self.marker:
            yield f"start: {before}(OPENED_TEXT | opened {rest} calls)"
            yield from _until(self.marker, "opened", literal)
        else:
            lead = f"({literal(self.lead)})? " if self.lead else ""
            yield f"start: {before}(OPENED_TEXT | {lead}{rest} calls)"
            yield f"OPENED_TEXT: /\\s*([^{_escaped(self.head[0])}\\s](.|\\n)*)?/"

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
        """Convert a message to the dict that chat templates take."""
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
        """Convert a call id to the length that the template requires. Equal ids stay equal."""
        return (
            digest("call", id)[: self.id_size] if self.id_size and len(id) != self.id_size else id
        )

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as text in this format."""
        return self.head + (self.again or "").join(map(self._written, calls)) + self.tail

    def _written(self, call: ToolCall) -> str:
        as_json = json.dumps(dict(call.arguments), ensure_ascii=False)
        arguments = as_json if self.pairs is None else self.pairs.write(call.arguments)
        slot_texts = {"name": call.name, "arguments": arguments, "id": self._id(call.id)}
        return "".join(
            slot_texts[slot] + after
            for slot, after in zip(self.slots, (*self.inner, self.end), strict=True)
        )


class CallReader:
    """An incremental parser of the calls in a growing answer. Each call is parsed only once.

    Attributes:
        calls: The calls so far, without repetitions.
        repeats: True if a call repeated an earlier call. A small model may repeat calls forever.
    """

    def __init__(self, format: CallFormat, schemas: Schemas = MappingProxyType({})) -> None:
        self.calls: tuple[ToolCall, ...] = ()
        self.repeats = False
        self._format, self._schemas = format, schemas
        self._mark: str | None = format.head
        self._at = -1

    def read(self, text: str, opening: int) -> tuple[ToolCall, ...]:
        """Return the complete calls in the answer so far. The first call begins at `opening`."""
        at = text.find(self._format.head, opening) if self._at < 0 else self._at
        while at >= 0 and self._mark is not None and text.startswith(self._mark, at):
            call, at = self._format.one(text, at + len(self._mark), self._schemas)
            if call is None:
                break
            self._at, self._mark = at, self._format.again
            if any(
                call.name == other.name and call.arguments == other.arguments
                for other in self.calls
            ):
                self.repeats = True
            else:
                self.calls += (call,)
        return self.calls


DEFAULT_CALL_FORMAT = CallFormat(
    head='<tool_call>{"name": "',
    inner=('", "arguments": ',),
    end="}</tool_call>",
    again='\n<tool_call>{"name": "',
    tail="",
    marker="<tool_call>",
)
"""The format for models whose chat template does not support tools."""


def call_id() -> str:
    """Return a new random call id."""
    return f"call_{secrets.token_hex(12)}"


def spelled(turns: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Rewrite tools, calls and results as plain text, for templates without tool support."""
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


def stripped_end(text: str, lo: int, hi: int) -> int:
    """Return `hi` minus the number of trailing white space characters in text[lo:hi]."""
    last = text[max(lo, hi - MAX_SPACE_CHARS) : hi]
    return hi - (len(last) - len(last.rstrip()))


def _escaped(text: str) -> str:
    """Return a regular expression that matches a text and is also valid in a character class."""
    return "".join(f"\\x{{{ord(letter):x}}}" for letter in text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_PYTHON_VALUES: Mapping[str, Any] = MappingProxyType({"True": True, "False": False, "None": None})
"""Python literals that some templates write in place of JSON's."""


def _value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Convert a text to the argument type in the tool's schema, or return the text unchanged."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    known = (schema.get("properties") or {}).get(name, {})
    try:
        value = _PYTHON_VALUES[text.strip()] if text.strip() in _PYTHON_VALUES else json.loads(text)
        fits = not isinstance(value, str) and Draft202012Validator(schema).evolve(
            schema=known
        ).is_valid(value)
    except (ValueError, re.error):  # not JSON, or a pattern that Python's `re` rejects
        return text
    return value if fits else text


def _types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows. Empty if the schema may allow any type."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if ref := schema.get("$ref"):
        names = ref.removeprefix("#/").split("/")
        return _types_of(reduce(lambda found, name: found[name], names, root), root)
    if types := schema.get("type"):
        return frozenset([types] if isinstance(types, str) else types)
    parts = [_types_of(each, root) for name in ("anyOf", "oneOf") for each in schema.get(name, ())]
    return frozenset().union(*parts) if all(parts) else frozenset()


def _pair_rules(
    pairs: Pairs, name: str, schema: Mapping[str, Any], literal: Callable[[str], str]
) -> Iterator[str]:
    """Yield Lark rules of arguments written one by one, in the order of the schema."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
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
    """Yield Lark rules of one argument's value and the text `after`, which ends a string value."""
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
        most = fields.get("maxLength", "")
        yield from _until(after, name, literal, f"{{{fields.get('minLength', 0)},{most}}}")


def _until(end: str, name: str, literal: Callable[[str], str], n_chars: str = "*") -> Iterator[str]:
    """Yield Lark rules of any text up to and including the first `end`."""
    text, written = f"{name.upper()}_TEXT", literal(end)
    letters, is_token, rest = written.partition("<[")
    if not is_token:
        yield f"{name}[lazy]: {text} {written}"
        yield f"{text}: /(.|\\n){n_chars}/"
        return
    # Text must not spell the token in characters, which the parser would take for the end.
    lead = json.loads(letters or '""')
    yield f"{name}: {text} <[{rest}"
    token = _escaped(end[len(lead) :])
    yield f"{text}: /(.|\\n){n_chars}{_escaped(lead)}/ & ~/(.|\\n)*{token}(.|\\n)*/"
