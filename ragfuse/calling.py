"""Tools and grammars of a question: checked before anything is computed, then what the answer must follow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse.asking import Ask, ends_of, is_sampled, is_single, kept_of
from ragfuse.core import Ended, ToolCall
from ragfuse.errors import InputError
from ragfuse.fork import ForkLock
from ragfuse.grammar import Grammar, json_text
from ragfuse.hf.grammar import LAYOUT, Grammars, check
from ragfuse.hf.model import HFModel
from ragfuse.hf.stream import FirstToken, StopWhere, TextSink
from ragfuse.text.calls import CallFormat, cut_at_stop, longest_start

Tool = Mapping[str, Any]
"""A tool as OpenAI has it: {"type": "function", "function": {"name", "description", "parameters"}}."""

FREE, NEVER, ALWAYS = "auto", "none", "required"
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """The tools of one question, all of them usable. choice: "auto", "none", "required" or a tool's name."""

    given: tuple[Tool, ...] = ()
    choice: str = FREE

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Those that the prompt tells of."""
        return () if self.choice == NEVER else self.given

    @property
    def schemas(self) -> dict[str, str]:
        """Of the arguments of all that may be called, as JSON text by name."""
        named = {tool["function"]["name"]: _schema(tool) for tool in self.offered}
        return {self.choice: named[self.choice]} if self.choice in named else named

    @property
    def must(self) -> bool:
        """Whether the answer is a call."""
        return bool(self.offered) and self.choice != FREE


def checked(tools: Sequence[Tool], choice: str, grammar: Grammar | None) -> Tools:
    """The tools of a question; InputError for what cannot be used, naming it."""
    names = [_name(tool) for tool in tools]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise InputError(f"Two tools are called '{twice}'; give each a name of its own.")
    if choice not in (FREE, NEVER, *names) and not (choice == ALWAYS and names):
        raise InputError(
            f"tool_choice is '{choice}', the tools are {names}; wanted 'auto', 'none', 'required' (with tools), or the "
            "name of one of them."
        )
    found = Tools(tuple(tools), choice)
    if grammar is not None:
        if found.must:
            raise InputError("A grammar and a tool that must be called were both asked for; leave one of them out.")
        check(grammar, _named(grammar))
    for tool in found.offered:
        name = tool["function"]["name"]
        check(Grammar("json", _schema(tool)), f"The parameters of the tool '{name}'")
    return found


def _named(grammar: Grammar) -> str:
    """What a grammar is called where it cannot be used."""
    if grammar.kind != "json":
        return "The grammar"
    title = json.loads(grammar.source).get("title")
    return f"The schema '{title}'" if title else "The schema"


def offered(ask: Ask) -> tuple[Tool, ...]:
    """The tools that a prompt tells of; InputError, before anything is loaded, for what cannot be used."""
    return checked(ask.tools, ask.tool_choice, ask.grammar).offered


def _name(tool: Tool) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            "A tool is {'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': {...}}}, its "
            f"name letters, digits, '_', '-' and '.'; found {tool!r}."
        )
    return name


def _schema(tool: Tool) -> str:
    """Of a tool's arguments, which are an object."""
    function = tool["function"]
    what = f"parameters of the tool '{function['name']}'"
    given = function.get("parameters") or {}
    text = json_text(given if not isinstance(given, Mapping) else {"type": "object", "properties": {}, **given}, what)
    if json.loads(text)["type"] != "object":
        raise InputError(f"The {what} are of type {given['type']!r}; wanted a schema of an object.")
    return text


class Caller:
    """What the answers of one engine follow, compiled once for its model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._grammars: dict[tuple[int, ...], Grammars] = {}

    def reply(self, ask: Ask, model: HFModel, calls: CallFormat) -> Reply:
        """How the answers to a question are held and read; InputError if its grammar cannot be compiled."""
        tools = checked(ask.tools, ask.tool_choice, ask.grammar)
        if ask.grammar is None and not tools.offered:
            return Reply(ask, model)
        ends = ends_of(model, ask.options)
        grammars = self._over(model, ends)
        grammar = ask.grammar or _rules(tools, calls, grammars)
        grammars.matcher(grammar)
        if ask.grammar is not None:  # which calls nothing, whatever its texts look like
            return Reply(ask, model, None, grammars, grammar)
        kept = grammars.own(calls.head + "".join(calls.inner) + (calls.again or "") + calls.tail)
        return Reply(ask, model, calls, grammars, grammar, tools.must, kept)

    def _over(self, model: HFModel, ends: tuple[int, ...]) -> Grammars:
        with self._lock:
            if ends not in self._grammars:
                self._grammars.clear()  # whoever names other end tokens goes on with them
                head = model.model.get_output_embeddings()
                n_tokens = int(head.weight.shape[0]) if head is not None else len(model.words)
                self._grammars[ends] = Grammars(model.words, n_tokens, ends)
            return self._grammars[ends]


def _rules(tools: Tools, calls: CallFormat, grammars: Grammars) -> Grammar:
    schemas = {name: _laid_out(schema) for name, schema in tools.schemas.items()}
    return Grammar.lark(calls.rules(schemas, grammars.literal, not tools.must, tools.choice not in schemas))


def _laid_out(schema: str) -> str:
    """A schema that tells llguidance how its JSON is to be written."""
    return json.dumps({**json.loads(schema), "x-guidance": dict(LAYOUT)})


@dataclass(frozen=True)
class Written:
    """An answer: its text, its ids up to the end token, why it ended, and its calls."""

    text: str
    token_ids: tuple[int, ...]
    reason: Ended
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Reply:
    """How the answers to one question are held to what was asked, and read.

    calls: None where there are no tools. must: the answer is calls and nothing else. kept: ids that are part of a
    call's markup. Stop strings end text; what a grammar or a call is made of ends by itself.
    """

    ask: Ask
    model: HFModel
    calls: CallFormat | None = None
    grammars: Grammars | None = None
    grammar: Grammar | None = None
    must: bool = False
    kept: frozenset[int] = frozenset()

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `generate` with what holds its answers; InputError for what a grammar cannot hold."""
        if self.grammars is None or self.grammar is None:
            return options
        if not is_single(options, self.model):
            raise InputError("Tools and grammars hold one sequence at a time, found num_beams above 1; leave it out.")
        held = self.grammars.processor(self.grammar, options.get("max_new_tokens"), is_sampled(options, self.model))
        return {**options, "logits_processor": [*(options.get("logits_processor") or ()), held]}

    @property
    def stopping(self) -> list[StopWhere]:
        """What ends the answers besides `generate`'s own."""
        return [] if self.calls is None else [StopWhere(self.text_of, self._is_over)]

    def _is_over(self, text: str) -> bool:
        """Whether text came to a stop string, or the last call is one that was made before."""
        opening = self._opening(text)
        return len(self.cut(text)[0]) < opening or (self.calls is not None and self.calls.repeats(text))

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, where they count."""
        return () if self.must or self.ask.grammar is not None else tuple(self.ask.stop)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of new ids, call markup included."""
        if self.calls is None or self.grammars is None or not self.kept:
            return self.model.text(ids)
        said = [id for id in ids if id in self.kept or id not in self.grammars.hidden]
        return str(self.model.words.decode(said, skip_special_tokens=False))

    def cut(self, text: str) -> tuple[str, int]:
        """What of a text counts as text, and how many of its characters do whatever follows."""
        opening = self._opening(text)
        body = cut_at_stop(text[:opening], self.stops)
        if len(body) < opening or opening < len(text):
            return body, len(body)
        ready = self.calls.ready(text) if self.calls is not None else len(text)
        return body, min(ready, len(body) - longest_start(body, self.stops))

    def _opening(self, text: str) -> int:
        if self.must:
            return 0
        at = self.calls.opens(text) if self.calls is not None else -1
        return at if at >= 0 else len(text)

    def sink(self, say: Callable[[str], None] | None, options: Mapping[str, Any]) -> FirstToken | TextSink:
        """Where the answer's tokens go while they come."""
        if say is None:
            return FirstToken()
        return TextSink(self.text_of, say, self.cut, ends_of(self.model, options))

    def written(self, ids: Sequence[int], options: Mapping[str, Any]) -> Written:
        """What new ids say."""
        kept, over = kept_of(ids, options, self.model)
        raw = self.text_of(kept)
        opening = self._opening(raw)
        text = cut_at_stop(raw[:opening], self.stops)
        calls = self.calls.read(raw) if self.calls is not None and len(text) == opening else ()
        if self.grammars is not None and self.grammar is not None and not over:
            over = (bool(calls) or self.calls is None) and self.grammars.is_whole(self.grammar, kept)
        reason: Ended = "stop" if over or len(text) < opening else "length"
        return Written(text, tuple(kept), "tool_calls" if calls and reason == "stop" else reason, calls)
