"""How calls of tools stand in text: the format a model writes them in, its grammar, and its way back to calls.

The format is a template's own, as it is found by a probe, or `PLAIN` where a template has none. Which tools there are,
and whether they must be called, is told from outside.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ragfuse.core import ToolCall, digest
from ragfuse.text.chunks import Piece
from ragfuse.text.turns import Turn

Slot = Literal["name", "arguments", "id"]
Schemas = Mapping[str, str]
"""Of each tool's arguments, as JSON text, by the tool's name."""


@dataclass(frozen=True)
class CallFormat:
    """Calls as text: `head`, then the slots of a call with `inner` between them, `again` and the next, `tail`.

    again: None where an answer holds one call. marker: what begins a call and nothing else; "" where calls are bare
    JSON, whose first letter (`opener`) then is what no other answer begins with. native: the chat template writes them.
    as_text: it takes arguments as JSON text, not as an object. id_size: of the ids it takes, 0 for any.
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

    @property
    def opener(self) -> str:
        """The first letter of a call."""
        return self.head.lstrip()[:1]

    def opens(self, text: str) -> int:
        """Where the first call begins in an answer, white space before it included; -1: nowhere."""
        if self.marker:
            at = text.find(self.marker)
        else:
            at = len(text) - len(text.lstrip()) if _literal(self.head).match(text.lstrip()) else -1
        return at if at < 0 else len(text[:at].rstrip())

    def read(self, text: str) -> tuple[ToolCall, ...]:
        """The calls of an answer; one that is cut off is none, one that was made before is not made again."""
        calls = self._read(text)
        return tuple(call for at, call in enumerate(calls) if not _is_among(call, calls[:at]))

    def repeats(self, text: str) -> bool:
        """Whether its last call was made before: a small model may go on so for ever."""
        calls = self._read(text) if self.again is not None and self.opens(text) >= 0 else []
        return bool(calls) and _is_among(calls[-1], calls[:-1])

    def _read(self, text: str) -> list[ToolCall]:
        at = self.opens(text)
        calls: list[ToolCall] = []
        before = _literal(self.head)
        while at >= 0 and (start := before.match(text, at)):
            call, at = self._one(text, start.end())
            if call is None:
                break
            calls.append(call)
            before = _literal(self.again) if self.again is not None else _NEVER
        return calls

    def ready(self, text: str) -> int:
        """How many characters of an answer's beginning are no part of a call, whatever follows."""
        at = self.opens(text)
        if at >= 0:
            return at
        if self.marker:
            return len(text[: len(text) - longest_start(text, (self.marker,))].rstrip())
        return 0 if text.lstrip()[:1] in ("", self.opener) else len(text)

    def _one(self, text: str, at: int) -> tuple[ToolCall | None, int]:
        found: dict[str, Any] = {}
        for slot, after in zip(self.slots, (*self.inner, ""), strict=True):
            value, at = self._id_at(text, at) if slot == "id" else _slot(slot, text, at, after)
            passed = _literal(after).match(text, at)
            if value is None or passed is None:
                return None, -1
            found[slot], at = value, passed.end()
        return ToolCall(found["name"], found["arguments"], call_id()), at

    def _id_at(self, text: str, at: int) -> tuple[str | None, int]:
        found = re.compile(f"[A-Za-z0-9_-]{{{self.id_size or '1,'}}}").match(text, at)
        return (found[0], found.end()) if found else (None, at)

    def rules(self, schemas: Schemas, literal: Callable[[str], str], free: bool = False, several: bool = True) -> str:
        """Lark rules of an answer that calls these tools; `free`: or is any text that opens no call.

        literal: how a text that must stand there is written in them.
        """
        again = self.again if several else None
        shared = _shared(self.tail, again) if again is not None else self.tail
        one = " | ".join(f"call_{at}" for at in range(len(schemas)))
        lines = [self._start(literal, free), f"one: ({one}) {literal(shared)}"]
        more = f"({literal(again[len(shared) :])} one)*" if again is not None else ""
        lines.append(f"calls: one {more} {literal(self.tail[len(shared) :])}")
        for at, (name, schema) in enumerate(schemas.items()):
            lines.append(f"call_{at}: {' '.join(self._terms(name, schema, literal))}")
        return "\n".join(lines) + "\n"

    def _start(self, literal: Callable[[str], str], free: bool) -> str:
        if not free:
            return f"start: {literal(self.head)} calls"
        rest = literal(self.head.lstrip()[len(self.marker) :])
        if not self.marker:
            return f"start: TEXT | {rest} calls\nTEXT: /\\s*([^{_exactly(self.opener)}\\s](.|\\n)*)?/"
        mark = literal(self.marker)
        if mark.startswith("<["):  # a token of its own; text that spells it letter by letter would be read as a call
            spelled_out = f"/(.|\\n)*{_exactly(self.marker)}(.|\\n)*/"
            return f"start: TEXT | TEXT {mark} {rest} calls\nTEXT: /(.|\\n)*/ & ~{spelled_out}"
        return f"start: TEXT | opened {rest} calls\nopened[lazy]: TEXT {mark}\nTEXT: /(.|\\n)*/"

    def _terms(self, name: str, schema: str, literal: Callable[[str], str]) -> Iterator[str]:
        for slot, after in zip(self.slots, (*self.inner, ""), strict=True):
            if slot == "name":
                yield literal(name)
            elif slot == "arguments":
                yield f"%json {schema}"
            else:
                yield f"/[a-zA-Z0-9]{{{self.id_size or 9}}}/"
            yield literal(after)

    def message(self, turn: Turn, content: str, values: Callable[[Any], Any]) -> dict[str, Any]:
        """A turn as chat templates take it, with this content; values: what is written for a call's arguments."""
        message: dict[str, Any] = {"role": turn.role, "content": content if turn.content or not turn.tool_calls else ""}
        if turn.tool_calls:
            message["tool_calls"] = [self._told(call, values) for call in turn.tool_calls]
        if turn.tool_call_id:
            message["tool_call_id"] = self._id(turn.tool_call_id)
        if turn.name:
            message["name"] = turn.name
        return message

    def _told(self, call: ToolCall, values: Callable[[Any], Any]) -> dict[str, Any]:
        given = values(call.arguments)
        function = {"name": call.name, "arguments": json.dumps(given) if self.as_text else given}
        return {"type": "function", "id": self._id(call.id), "function": function}

    def _id(self, id: str) -> str:
        """An id as the template takes it, the same for the same one."""
        return digest("call", id)[: self.id_size] if self.id_size and len(id) != self.id_size else id

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as this format has them."""
        texts = [self._written(call) for call in calls]
        return self.head + (self.again or "").join(texts) + self.tail if texts else ""

    def _written(self, call: ToolCall) -> str:
        told = {"name": call.name, "arguments": json.dumps(dict(call.arguments)), "id": self._id(call.id)}
        return "".join(told[slot] + after for slot, after in zip(self.slots, (*self.inner, ""), strict=True))


PLAIN = CallFormat(
    head='<tool_call>{"name": "',
    inner=('", "arguments": ',),
    again='}</tool_call>\n<tool_call>{"name": "',
    tail="}</tool_call>",
    marker="<tool_call>",
)
"""For models whose chat template says nothing of tools."""


def call_id() -> str:
    """A new id."""
    return f"call_{secrets.token_hex(12)}"


def spelled(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The same conversation in words that every template renders: tools, calls and results as `PLAIN` text.

    Contents are pieces; a result's chunks stay chunks.
    """
    told = [_spelled(turn) for turn in turns]
    if tools:
        text = Piece(_described(tools))
        if told and told[0].role == "system":
            told[0] = replace(told[0], content=(*told[0].content, Piece("\n\n"), text))
        else:
            told.insert(0, Turn("system", (text,)))
    return list(_joined(told))


def _described(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        'You can call tools. A call is written as <tool_call>{"name": name, "arguments": {...}}</tool_call>, several '
        f"of them one below the other; their results come as <tool_response>. These are the tools:\n{lines}"
    )


def _spelled(turn: Turn) -> Turn:
    if turn.tool_calls:
        gap = (Piece("\n"),) if turn.content else ()
        return Turn(turn.role, (*turn.content, *gap, Piece(PLAIN.write(turn.tool_calls))))
    if turn.role == "tool":
        return Turn("tool", (Piece("<tool_response>\n"), *turn.content, Piece("\n</tool_response>")))
    return turn


def _joined(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Results as the user's words; those that follow one another, or come before a question, in one message."""
    held: Turn | None = None
    for turn in turns:
        if held is not None and turn.role in ("tool", "user"):
            held = Turn("user", (*held.content, Piece("\n"), *turn.content))
        else:
            if held is not None:
                yield held
            held = Turn("user", turn.content) if turn.role == "tool" else None
            if held is None:
                yield turn
            continue
        if turn.role == "user":
            yield held
            held = None
    if held is not None:
        yield held


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Text before the first stop string."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(found)] if found else text


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def longest_start(text: str, words: Sequence[str]) -> int:
    """Characters at the end of `text` that could be the beginning of one of these."""
    starts = (word[:size] for word in words for size in range(1, len(word)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


def _exactly(text: str) -> str:
    """A regular expression of this text and nothing else, in a class of letters too."""
    return "".join(f"\\x{{{ord(letter):x}}}" for letter in text)


def _is_among(call: ToolCall, calls: Sequence[ToolCall]) -> bool:
    return any(call.name == other.name and call.arguments == other.arguments for other in calls)


_NEVER = re.compile(r"(?!)")


def _literal(text: str) -> re.Pattern[str]:
    """Matches a text of the format, whatever white space a model puts there."""
    words = [re.escape(word) for word in text.split()]
    inner = r"\s*".join(words)
    return re.compile(rf"\s*{inner}") if words else re.compile("")


def _slot(slot: Slot, text: str, at: int, after: str) -> tuple[Any, int]:
    """What stands in a slot, and where it ends; None if nothing that belongs there."""
    if slot != "arguments":
        found = re.compile(r"[^\s\"\\{}<>\[\]()]+?(?=" + _literal(after).pattern + ")").match(text, at)
        return (found[0], found.end()) if found else (None, at)
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):  # no JSON, or deeper than anybody writes it
        return None, at
    return (value, end) if isinstance(value, dict) else (None, at)
