"""Output constraints: tools, grammars, stop strings and penalties, checked first and then enforced
on the answer.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ragfuse.engine.ask import Ask
from ragfuse.engine.draft import Draft
from ragfuse.engine.options import ends_of, options_of
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.request import Request
from ragfuse.errors import InputError, about
from ragfuse.hf.grammar import GrammarCompiler, GrammarProcessor, check
from ragfuse.hf.handover import resolve_option, stop_strings_of
from ragfuse.hf.held_schema import broken, held_schema
from ragfuse.hf.model import HFModel
from ragfuse.hf.penalties import Penalties
from ragfuse.hf.stream import Detokenizer
from ragfuse.text.chat_template import ChatTemplate, Thoughts
from ragfuse.text.tool_calls import CallFormat
from ragfuse.types.answer import Answer, Ended, Trace
from ragfuse.types.grammar import Grammar, json_text
from ragfuse.types.prompt import Prompt

Tool = Mapping[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}.
"""

TOOLS_AUTO, TOOLS_NONE, TOOLS_REQUIRED = "auto", "none", "required"
PENALTIES = ("presence_penalty", "frequency_penalty", "logit_bias")
RAGFUSE_OPTIONS = (*PENALTIES, "stop_token_ids")
"""Options that transformers' `generate` does not have."""
TAIL, LONG_TAIL = 32, 4096
"""How many of a prompt's last tokens are searched for a tag that opens reasoning: usually, and
where the answer continues a message.
"""
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """The checked tools of one question.

    Args:
        given: The tools.
        choice: "auto", "none", "required" or a tool's name.
    """

    given: tuple[Tool, ...] = ()
    choice: str = TOOLS_AUTO

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt describes."""
        return () if self.choice == TOOLS_NONE else self.given

    @property
    def schemas(self) -> dict[str, str]:
        """The JSON schemas (as text) of the arguments of each tool that may be called, by the
        tool's name.
        """
        named = {tool["function"]["name"]: _schema(tool) for tool in self.offered_tools}
        return {self.choice: named[self.choice]} if self.choice in named else named

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return bool(self.offered_tools) and self.choice != TOOLS_AUTO


def checked(tools: Sequence[Tool], choice: str, grammar: Grammar | None) -> Tools:
    """Check the tools and the grammar of a question, and return the tools.

    Raises:
        InputError: A tool, the choice or the grammar cannot be used; the message names it.
    """
    names = [_name(tool) for tool in tools]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise InputError(f"Two tools are called '{twice}'; give each a name of its own.", "tools")
    if choice not in (TOOLS_AUTO, TOOLS_NONE, *names) and not (choice == TOOLS_REQUIRED and names):
        raise InputError(
            f"tool_choice is '{choice}', the tools are {names}; wanted 'auto', 'none', 'required'"
            " (with tools), or the name of one of them.",
            "tool_choice",
        )
    found = Tools(tuple(tools), choice)
    if grammar is not None:
        if found.must_call:
            raise InputError(
                "A grammar and a tool that must be called were both asked for; leave one of them"
                " out.",
                "grammar",
            )
        with about("grammar"):
            check(grammar, "The schema" if grammar.kind == "json" else "The grammar")
    for tool in found.offered_tools:
        name = tool["function"]["name"]
        with about("tools"):
            check(Grammar("json", _schema(tool)), f"The parameters of the tool '{name}'")
    return found


def offered_tools(ask: Ask) -> tuple[Tool, ...]:
    """Return the tools that the prompt describes; raise InputError for unusable ones, before
    anything is loaded.
    """
    return checked(ask.tools, ask.tool_choice, ask.grammar).offered_tools


def _name(tool: Tool) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            "A tool must be {'type': 'function', 'function': {'name': ..., 'description': ...,"
            " 'parameters': {...}}}, and its name letters, digits, '_', '-' and '.'; found"
            f" {tool!r}.",
            "tools",
        )
    return name


def _schema(tool: Tool) -> str:
    """Return the JSON schema (as text) of a tool's arguments; raise InputError unless it describes
    an object.
    """
    function = tool["function"]
    what = f"parameters of the tool '{function['name']}'"
    given = function.get("parameters") or {}
    text = json_text(
        given if not isinstance(given, Mapping) else {"type": "object", "properties": {}, **given},
        what,
    )
    if json.loads(text)["type"] != "object":
        raise InputError(
            f"The {what} must be a JSON schema of type 'object'; found type {given['type']!r}."
        )
    return text


class ConstraintCompiler:
    """Compiles the constraints of one engine's answers; compilers are kept for its model.
    Thread-safe.
    """

    def __init__(self, prompts: PromptBuilder) -> None:
        self._runtime, self._prompts, self._lock = prompts.runtime, prompts, threading.Lock()
        self._grammars: dict[tuple[int, ...], GrammarCompiler] = {}

    def compile(self, request: Request, prompt: Prompt) -> OutputConstraints:
        """Return the constraints of the answers to a prompt, and the options of `generate` for
        them.

        Raises:
            InputError: The tools or the grammar cannot be used, or the chat template has no
                variable of a name in `chat_template_kwargs`.
        """
        ask, model, calls = request.ask, request.model, self._prompts.calls
        tools, form = checked(ask.tools, ask.tool_choice, ask.grammar), ask.grammar
        if ask.chat_template_kwargs and (name := self.template.unread(ask.chat_template_kwargs)):
            raise InputError(
                f"chat_template_kwargs has '{name:.40}', which the chat template of {model.name}"
                f" does not use. It uses {sorted(self.template.names)}; leave others out.",
                "chat_template_kwargs",
            )
        room = model.max_context and model.max_context - prompt.segments[-1].stop + 1
        held = OutputConstraints(ask, model, options=options_of(ask, self._runtime.settings, room))
        tags: tuple[str, ...] = ()
        thoughts = self.template.thoughts
        # answers to any other prompt have no reasoning
        if thoughts is not None and request.is_chat and form is None and not tools.must_call:
            continues, tags = ask.continue_final_message, (thoughts.open, thoughts.close)
            last_ids = list(prompt.token_ids[-(LONG_TAIL if continues else TAIL) :])
            end = str(model.tokenizer.decode(last_ids, skip_special_tokens=False))
            held = replace(held, thoughts=thoughts, is_thinking=thoughts.is_open(end, continues))
        if form is None and not tools.offered_tools:
            return held
        grammars = self._over(model, ends_of(model, ask.options))
        # The texts of any other form are never read as tool calls.
        may_call = form is None or (tools.offered_tools and form.kind == "json" and calls.marker)
        grammar = _rules(tools, calls, grammars, ask, tags) if form is None or may_call else form
        with about("tools" if form is None else "grammar"):
            grammars.matcher(grammar)
        return replace(
            held,
            calls=calls if may_call else None,
            grammars=grammars,
            grammar=grammar,
            must_call=tools.must_call,
            schemas=tools.schemas,
        )

    @cached_property
    def template(self) -> ChatTemplate:
        """The properties of the model's chat template, read once."""
        model = self._runtime.model
        tokenizer = model.tokenizer if model.has_tokenizer else None
        added = () if tokenizer is None else tokenizer.added_tokens_decoder.values()
        return ChatTemplate.of(
            getattr(tokenizer, "chat_template", None), {str(token) for token in added}
        )

    def _over(self, model: HFModel, ends: tuple[int, ...]) -> GrammarCompiler:
        with self._lock:
            if ends not in self._grammars:
                # keep one: a caller with its own end tokens usually stays with them
                self._grammars.clear()
                self._grammars[ends] = GrammarCompiler(model.tokenizer, _n_logits(model), ends)
            return self._grammars[ends]


def _rules(
    tools: Tools, calls: CallFormat, grammars: GrammarCompiler, ask: Ask, tags: Sequence[str]
) -> Grammar:
    schemas = {name: held_schema(schema)[0] for name, schema in tools.schemas.items()}
    several = ask.parallel_tool_calls and tools.choice not in schemas
    form = "" if ask.grammar is None else held_schema(ask.grammar.source)[0]
    return Grammar.lark(
        calls.rules(schemas, grammars.literal, not tools.must_call, several, tags, form)
    )


@dataclass(frozen=True)
class OutputConstraints:
    """The constraints of the answers to one question: they steer generation, and read its tokens as
    an `Answer`.

    Stop strings end plain text only; tool calls, and text that follows a grammar, end by
    themselves.

    Args:
        ask: The question's options.
        model: The model.
        calls: The format of tool calls; None without tools.
        grammars: The grammar compiler; None without a grammar.
        grammar: The grammar that the answer or its tool calls follow.
        must_call: Whether the answer must consist of tool calls only.
        schemas: JSON schemas of the tools' arguments, by tool name.
        thoughts: The tags around reasoning; None where the model writes none.
        is_thinking: Whether the prompt ends inside reasoning that it opened.
        options: The options of `generate` that were asked for.
    """

    ask: Ask
    model: HFModel
    calls: CallFormat | None = None
    grammars: GrammarCompiler | None = None
    grammar: Grammar | None = None
    must_call: bool = False
    schemas: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    thoughts: Thoughts | None = None
    is_thinking: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def generate_options(self) -> dict[str, Any]:
        """Return options for transformers' `generate`, with logits processors that enforce the
        constraints.

        Raises:
            InputError: An option names ids that are not tokens.
        """
        options = self.options
        processors = [*(options.get("logits_processor") or ())]
        presence, frequency, bias = (options.get(name) for name in PENALTIES)
        if presence or frequency:
            processors.append(Penalties(float(presence or 0), float(frequency or 0)))
        if self.grammars is not None and self.grammar is not None:
            processors.append(GrammarProcessor(self.grammars, self.grammar))
        supported = {name: value for name, value in options.items() if name not in RAGFUSE_OPTIONS}
        if bias:
            _check_ids("logit_bias", bias, self.model)
            supported["sequence_bias"] = {(int(id),): float(value) for id, value in bias.items()}
        if stops := options.get("stop_token_ids"):
            _check_ids("stop_token_ids", stops, self.model)
            supported["eos_token_id"] = list(ends_of(self.model, options))
        return {
            **supported,
            "stop_strings": (),
            **({"logits_processor": processors} if processors else {}),
        }

    def stops(self) -> tuple[str, ...]:
        """Return the stop strings that apply: the requested ones and the model's own.

        None apply to an answer that follows a grammar or must be tool calls.
        """
        if self.must_call or self.ask.grammar is not None:
            return ()
        return tuple(dict.fromkeys((*self.ask.stop, *stop_strings_of(self.options, self.model))))

    def draft(self) -> Draft:
        """Return an empty draft of an answer."""
        stops, tags = self.stops(), self.thoughts
        texts = (*stops, *(self.calls.texts if self.calls is not None else ()))
        return Draft(
            Detokenizer.of(
                self.model.tokenizer, (*texts, tags.open, tags.close) if tags is not None else texts
            ),
            ends_of(self.model, self.options),
            stops,
            self.calls,
            self.schemas,
            None if self.ask.parallel_tool_calls else 1,
            self.must_call,
            tags,
            self.is_thinking,
        )

    def _unheld(self, draft: Draft) -> tuple[str, ...]:
        """Return what of the schemas was not held while decoding, and what of it the answer
        breaks.
        """
        texts = [(self.schemas[call.name], json.dumps(call.arguments)) for call in draft.calls]
        if self.ask.grammar is not None and self.ask.grammar.kind == "json":
            texts.append((self.ask.grammar.source, draft.text))
        unheld = list[str]()
        for schema, text in texts:
            unheld += (*held_schema(schema)[1], *broken(schema, text))
        return tuple(unheld)

    def read(self, draft: Draft, trace: Trace) -> Answer:
        """Return the answer of a draft that has ended."""
        token_ids, calls = tuple(draft.ids), draft.calls
        has_time_limit = bool(resolve_option("max_time", self.options, self.model))
        is_short = len(token_ids) < self.options.get("max_new_tokens", 0) and not has_time_limit
        over = draft.over or is_short
        reason: Ended = "stop" if over and (calls or not self.must_call) else "length"
        reason = "tool_calls" if calls and reason == "stop" else reason
        trace = replace(trace, unheld=self._unheld(draft))
        return Answer(draft.text, token_ids, reason, trace, calls, draft.reasoning, draft.end_ids)


def _check_ids(name: str, ids: Iterable[Any], model: HFModel) -> None:
    """Raise InputError if the option `name` has an id that is not a token's."""
    n_ids = _n_logits(model)
    wrong = next((id for id in ids if not str(id).isdecimal() or int(id) >= n_ids), None)
    if wrong is not None:
        raise InputError(
            f"{name} has {wrong!r:.40}, which is not a token id of {model.name}; wanted 0 to"
            f" {n_ids - 1:,}.",
            name,
        )


def _n_logits(model: HFModel) -> int:
    """Return the size of the model's logits: how many tokens it can generate."""
    head = model.model.get_output_embeddings()
    return int(head.weight.shape[0]) if head is not None else len(model.tokenizer)
