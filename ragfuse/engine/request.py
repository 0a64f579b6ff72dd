"""`Request`, a validated question with its options, and `PreparedPrompt`, a prefilled prompt."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ragfuse.engine.ask import NO_LIMIT, Ask, Question, is_ids, mended_question, messages_of
from ragfuse.engine.runtime import Runtime
from ragfuse.errors import InputError, about
from ragfuse.hf.grammar import GrammarProcessor, Penalties, check
from ragfuse.hf.handover import resolve_option
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.process.jobs import EXITING
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.text.chat_messages import ChatMessage
from ragfuse.types.answer import StreamTrace, Thought
from ragfuse.types.grammar import Grammar, json_text
from ragfuse.types.plan import LoadPlan

Tool = Mapping[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "parameters", ...}}."""

TOOLS_AUTO, TOOLS_NONE, TOOLS_REQUIRED = "auto", "none", "required"
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def tools_of(ask: Ask) -> tuple[Tool, ...]:
    """Validate the tools and the grammar; return the tools that the prompt describes.

    Raises:
        InputError: A tool, the tool choice or the grammar is invalid; the message says which.
    """
    choice, grammar, names = ask.tool_choice, ask.grammar, [_name(tool) for tool in ask.tools]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise InputError(f"Two tools are called '{twice}'. Give each a unique name.", "tools")
    if choice not in (TOOLS_AUTO, TOOLS_NONE, *names) and not (choice == TOOLS_REQUIRED and names):
        raise InputError(
            f"tool_choice is '{choice}', but the tools are {names}. Use 'auto', 'none',"
            " 'required' (if there are tools), or the name of a tool.",
            "tool_choice",
        )
    offered = () if choice == TOOLS_NONE else tuple(ask.tools)
    if grammar is not None:
        if offered and choice != TOOLS_AUTO:
            raise InputError(
                "A grammar cannot be combined with a forced tool call. Remove one of the two.",
                "grammar",
            )
        with about("grammar"):
            check(grammar, "The schema" if grammar.kind == "json" else "The grammar")
    with about("tools"):
        for name, schema in schemas_of(offered).items():
            check(Grammar("json", schema), f"The parameters of the tool '{name}'")
    return offered


def schemas_of(tools: Sequence[Tool]) -> dict[str, str]:
    """Return the JSON schemas of the tools' arguments, as text, by tool name."""
    return {tool["function"]["name"]: _schema(tool) for tool in tools}


def _name(tool: Tool) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"A tool must be {{'type': 'function', 'function': {{'name': ..., 'description': ...,"
            f" 'parameters': {{...}}}}}}. Its name may contain letters, digits, '_', '-' and"
            f" '.'; found {tool!r}.",
            "tools",
        )
    return name


def _schema(tool: Tool) -> str:
    """Return the JSON schema of a tool's arguments. The schema's type must be "object"."""
    function = tool["function"]
    what = f"parameters of the tool '{function['name']}'"
    given = function.get("parameters") or {}
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        raise InputError(f"The {what} must be a JSON schema of type 'object'; found {given!r:.80}.")
    return json_text({"type": "object", "properties": {}, **given}, what)


Say = Callable[[str | Thought], None] | None
"""A callback for each generated piece of an answer; None means that nothing is streamed."""
OnPrepared = Callable[["PreparedPrompt"], object] | None
"""A callback for the prefilled prompt, before the answer is generated; None means no callback."""


@dataclass(frozen=True)
class Request:
    """A checked question with its options, and the model that answers it.

    Args:
        question: A text, messages, token ids or a prompt in PML.
        ask: Options of the answer.
        runtime: Provides the model, the tenant and the store.
        tools: The tools that the prompt describes.
        ends: Events. Setting any of these events ends the generation.
        say: Callback for each generated piece of the answer.
        on_prepared: Callback for the prefilled prompt.
        has_company: True if answers to other questions are generated at the same time.
        came_s: `time.perf_counter()` when the question arrived.
    """

    question: Question
    ask: Ask
    runtime: Runtime
    tools: tuple[Tool, ...]
    ends: tuple[threading.Event, ...] = ()
    say: Say = None
    on_prepared: OnPrepared = None
    has_company: bool = False
    came_s: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(
        cls, question: Question, ask: Ask | None, runtime: Runtime, *ends: threading.Event
    ) -> Request:
        """Return the request for a question that arrives now.

        The answer stops when any of `ends` is set, or when the process ends.

        Raises:
            InputError: The question, a tool or the grammar is invalid.
        """
        ask = ask or Ask()
        with about("prompt"):
            return cls(mended_question(question), ask, runtime, tools_of(ask), (*ends, EXITING))

    @cached_property
    def messages(self) -> list[ChatMessage]:
        """The messages of the question; empty for token ids or a PML prompt.

        Raises:
            InputError: Token ids came with tools or a session.
        """
        is_bare = is_ids(self.question) and not self.tools and self.ask.session is None
        if is_bare or isinstance(self.question, PMLPrompt):
            return []
        return messages_of(self.question)

    @cached_property
    def schemas(self) -> dict[str, str]:
        """The JSON schemas of the callable tools' arguments, by tool name."""
        named, choice = schemas_of(self.tools), self.ask.tool_choice
        return {choice: named[choice]} if choice in named else named

    @property
    def must_call(self) -> bool:
        """True if the answer must be a tool call."""
        return bool(self.tools) and self.ask.tool_choice != TOOLS_AUTO

    @property
    def is_chat(self) -> bool:
        """True if the chat template renders the question, so the answer may contain reasoning.

        The template does not render token ids, or a text without tools and without a session.
        """
        is_plain = isinstance(self.question, str) or is_ids(self.question)
        return bool(self.tools) or self.ask.session is not None or not is_plain

    def max_tokens(self, room: int | None = None) -> int | None:
        """Return the request's maximum tokens of the answer; None if the request sets no maximum.

        Args:
            room: The maximum to return if the request asks for `NO_LIMIT`.
        """
        asked = self.ask.options.get("max_new_tokens") or self.ask.max_tokens
        return room if asked == NO_LIMIT else asked

    def limit(self, window: int) -> int:
        """Return the maximum tokens of a shortened prompt, so that `window` has room for an answer.

        At most a quarter of `window` is left to the answer.
        """
        wanted = self.max_tokens() or self.runtime.settings.max_tokens
        return window - min(wanted, max(1, window // 4))

    @property
    def began_s(self) -> float:
        """`time.perf_counter()` at the later of two events: question arrived, model loaded."""
        return max(self.came_s, self.runtime.loaded_s)

    @property
    def left_s(self) -> float | None:
        """Seconds left until the deadline for the first token; None without a deadline."""
        deadline_s = self.ask.deadline_s
        return (
            None
            if deadline_s is None
            else max(0.0, self.began_s + deadline_s - time.perf_counter())
        )

    @property
    def is_abandoned(self) -> bool:
        """True if the answer was stopped and will be discarded, for example if the reader left."""
        return any(end.is_set() and getattr(end, "is_abandoned", True) for end in self.ends)

    def check_open(self) -> None:
        """Raise InputError if any event in `ends` is set."""
        if any(end.is_set() for end in self.ends):
            raise InputError(
                "The answer was stopped before its first token: its stream or batch was closed, or"
                " the engine was shut down. Ask again."
            )

    @property
    def model(self) -> HFModel:
        """The model that answers."""
        return self.runtime.model


@dataclass(frozen=True)
class PreparedPrompt:
    """A prefilled prompt whose answer can be generated.

    Args:
        request: The request.
        plan: The plan that was carried out.
        prefill: The result of the prefill.
        load_s: Seconds spent loading.
        wait_s: Seconds that computing waited for loading.
        compute_s: Seconds spent computing.
        stream: The trace of streamed KV; None if nothing was streamed.
    """

    request: Request
    plan: LoadPlan
    prefill: Prefill
    load_s: float
    wait_s: float
    compute_s: float
    stream: StreamTrace | None = None

    def n_held(self, n_ids: int) -> int:
        """Return how many rows of the prompt and of its answer (`n_ids` tokens) are in the cache.

        The answer's final token is never in the cache. If more of the answer's tokens are missing,
        only the prompt's rows are counted.
        """
        cache, n_prompt = self.prefill.cache, len(self.plan.prompt)
        if cache is None or cache.length != n_prompt + n_ids - 1:
            return n_prompt
        return cache.length


RAGFUSE_OPTIONS = ("presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids")
"""Options of an answer that transformers' `generate` does not have."""


def generate_options(
    request: Request, n_prompt: int, rules: Sequence[GrammarProcessor] = ()
) -> dict[str, Any]:
    """Return the options for transformers' `generate`: greedy by default, limited to the context.

    Stop strings are not handled here (see `generate.py`).

    Args:
        request: The request.
        n_prompt: Position after the prompt's last token.
        rules: Further logits processors, such as grammars.

    Raises:
        InputError: `min_new_tokens` exceeds the room for the answer, or an option has invalid token
            ids.
    """
    ask, model, options = request.ask, request.model, dict(request.ask.options)
    config = options.get("generation_config")
    if config is None:
        options.setdefault("do_sample", False)
    if not options.get("do_sample", getattr(config, "do_sample", False)):
        options = {"temperature": None, "top_p": None, "top_k": None, **options}
    if options.get("max_length") is None:
        room = model.max_context and model.max_context - n_prompt + 1
        limit = (
            request.max_tokens(room)
            or getattr(config, "max_new_tokens", None)
            or request.runtime.settings.max_tokens
        )
        options["max_new_tokens"] = limit if room is None else min(limit, room)
        min_tokens = options.get("min_new_tokens") or 0
        if min_tokens > options["max_new_tokens"]:
            raise InputError(
                f"min_new_tokens is {min_tokens}, but the answer can have at most"
                f" {options['max_new_tokens']} tokens. Lower min_new_tokens, raise max_tokens, or"
                " shorten the prompt.",
                "min_new_tokens",
            )
    presence, frequency, bias, stops = (options.pop(name, None) for name in RAGFUSE_OPTIONS)
    processors = [*(options.get("logits_processor") or ())]
    if presence or frequency:
        processors.append(Penalties(float(presence or 0), float(frequency or 0)))
    if bias:
        _check_ids("logit_bias", bias, model)
        options["sequence_bias"] = {(int(id),): float(value) for id, value in bias.items()}
    if stops:
        _check_ids("stop_token_ids", stops, model)
        options["eos_token_id"] = list(ends_of(model, ask.options))
    if processors := [*processors, *rules]:
        options["logits_processor"] = processors
    return {**options, "stop_strings": ()}


def ends_of(model: HFModel, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, ...]:
    """Return the ids that end an answer: the model's end tokens and `stop_token_ids`."""
    ends = resolve_option("eos_token_id", options, model)
    own = tuple(ends) if isinstance(ends, Sequence) else () if ends is None else (ends,)
    return tuple(dict.fromkeys((*own, *(options.get("stop_token_ids") or ()))))


def n_logits(model: HFModel) -> int:
    """Return the size of the model's logits: the number of tokens that the model can generate."""
    head = model.model.get_output_embeddings()
    return int(head.weight.shape[0]) if head is not None else len(model.tokenizer)


def _check_ids(name: str, ids: Iterable[Any], model: HFModel) -> None:
    n_ids = n_logits(model)
    wrong = next((id for id in ids if not str(id).isdecimal() or int(id) >= n_ids), None)
    if wrong is not None:
        raise InputError(
            f"{name} has {wrong!r:.40}; token ids of {model.name} are 0 to {n_ids - 1:,}.",
            name,
        )
