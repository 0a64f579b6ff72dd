"""The options of one answer (`Ask`). They load neither torch nor a model, so that a client of a server can have them.

`engine.options` says what they mean for transformers' `generate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal

from ragfuse.errors import SettingsError
from ragfuse.text.mended import mended_value
from ragfuse.types.arguments import checks_arguments
from ragfuse.types.grammar import Grammar
from ragfuse.types.selection import known_policy
from ragfuse.types.whole_text import whole_text

NO_LIMIT = -1
"""The `max_tokens` of an answer that gets all of the model's context behind its prompt."""
RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Parameters of `apply_chat_template` itself, which therefore cannot be variables of a chat template."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Options that change a sampled answer alone."""
SAMPLED = (*SAMPLING, "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
"""What `Ask.generate_options` takes."""
_TEXT, _NUMBER, _BOOL = ((str,), "a text"), ((Real,), "a number"), ((bool,), "True or False")
_LIST, _MAPPING = ((Sequence,), "a list"), ((Mapping,), "a mapping")
_FIELD_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        **dict.fromkeys(("policy", "session", "overflow", "tool_choice"), _TEXT),
        **dict.fromkeys(("max_tokens", "seed"), ((Integral,), "a whole number")),
        **dict.fromkeys(("ratio", "deadline_s"), _NUMBER),
        **dict.fromkeys(("reuse", "parallel_tool_calls", "blend", "continue_final_message"), _BOOL),
        **dict.fromkeys(("stop", "tools", "documents"), _LIST),
        **dict.fromkeys(("options", "chat_template_kwargs"), _MAPPING),
    }
)
"""The types that each field of an `Ask` accepts, and their name in an error message."""


@checks_arguments
@dataclass(frozen=True)
class Ask:
    """The options of one answer; None means the value in the settings.

    Args:
        max_tokens: Most tokens of the answer. More than the model's context has room for behind the prompt are refused;
            where earlier turns or chunks may be left out for them, more than it takes in all.
            -1 is no limit: as many as fit.
        policy: The selection policy: which tokens of reused chunks are recomputed.
        ratio: The share of them that is recomputed, 0..1.
        reuse: False for a full prefill without any reuse, for comparison.
        stop: Stop strings, besides those of the model's generation config. The answer ends before the first. They are
            looked for in its text only, not in the prompt, reasoning, tool calls or text that follows a grammar.
        seed: The seed for sampling.
        deadline_s: Seconds from planning to the first token. On a measured machine it limits how far loading time may
            raise the ratio, and the plan's forecast says where it cannot be met.
        options: Any options of transformers' `generate`; also OpenAI's `presence_penalty`, `frequency_penalty` and
            `logit_bias` (by token id), which count tokens of the answer only, and `stop_token_ids`, which end the
            answer like the model's own end tokens.
        tools: Tools that the model may call, in OpenAI's format.
        tool_choice: "auto" (text or calls), "none", "required", or the name of the tool to call.
        parallel_tool_calls: False for at most one call.
        grammar: The grammar that the answer must match. Beside a JSON schema it may call tools instead.
        overflow: For a prompt that is too long: "error", or "drop" to leave out its last chunks until there is room
            for an answer of `max_tokens`, or of a quarter of the model's context.
        session: The name of a stored conversation that this question continues. Messages that include one of the
            assistant are the whole conversation; other messages, or a text, are its next turn.
        blend: For a prompt in PML: recompute tokens of its modules by policy and ratio, as for chunks.
        documents: (text, source) of the documents retrieved for the question. Those in the prompt are encoded after
            the answer and known from then on, as after `Engine.know`.
        chat_template_kwargs: Variables of the chat template, such as {"enable_thinking": False}.
        continue_final_message: Whether the last message is the beginning of the answer, which continues it.
    """

    max_tokens: int | None = None
    policy: str | None = None
    ratio: float | None = None
    reuse: bool = True
    stop: Sequence[str] = ()
    seed: int | None = None
    deadline_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    overflow: Literal["error", "drop"] | None = None
    session: str | None = None
    blend: bool = False
    documents: Sequence[tuple[str, str]] = field(default=(), repr=False)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False

    @staticmethod
    def template_kwargs(*fields: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the `chat_template_kwargs` and `enable_thinking` of several mappings; later ones win.

        Args:
            fields: The fields of a model, then those of a call.
        """
        found: dict[str, Any] = {}
        for each in fields:
            found |= each.get("chat_template_kwargs") or {}
            if each.get("enable_thinking") is not None:
                found["enable_thinking"] = each["enable_thinking"]
        return found

    @staticmethod
    def generate_options(values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `options` for sampling and penalties by OpenAI's names; without a temperature decoding is greedy.

        Values that change nothing, as `top_p` without a temperature, are checked all the same.

        Args:
            values: A model's fields or a call's arguments; None and other names are left out.

        Raises:
            SettingsError: A number is outside of its range, or no number.
        """
        checked = _checked_options({name: values[name] for name in SAMPLED if values.get(name) is not None})
        is_sampled = bool(checked.get("temperature"))
        options = {name: value for name, value in checked.items() if is_sampled or name not in SAMPLING}
        return {**options, **({"do_sample": True} if is_sampled else {})}

    @staticmethod
    def tool_choice_of(choice: str | bool | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> str:
        """Read OpenAI's and LangChain's ways to say whether a tool must be called, as a value of `tool_choice`.

        Args:
            choice: "auto", "none", "required", "any" or True (both: required), a tool's name, or a mapping with one.
            tools: The offered tools, in OpenAI's form.

        Returns:
            "auto", "none", "required" or a tool's name: also where one must be called and only one is offered. Whether
            there is a tool of that name is not checked.
        """
        if isinstance(choice, Mapping):
            function = choice.get("function")
            choice = (function if isinstance(function, Mapping) else choice).get("name") or choice.get("type")
        if choice not in (True, "any", "required"):
            return str(choice or "auto")
        function = tools[0].get("function") if len(tools) == 1 else None
        return str(function.get("name")) if isinstance(function, Mapping) else "required"

    def __post_init__(self) -> None:
        for each in fields(self):
            self._check(each.name)
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise SettingsError(f"ratio is {self.ratio}; wanted a number from 0 to 1.", "ratio")
        if self.deadline_s is not None and not self.deadline_s >= 0:
            raise SettingsError(f"deadline_s is {self.deadline_s}; wanted 0 seconds or more.", "deadline_s")
        if self.policy is not None:
            known_policy(self.policy)
        if self.max_tokens is not None and self.max_tokens < 1 and self.max_tokens != NO_LIMIT:
            raise SettingsError(
                f"max_tokens is {self.max_tokens}; wanted at least 1 new token, or -1 for no limit.", "max_tokens"
            )
        if self.overflow not in (None, "error", "drop"):
            raise SettingsError(f"overflow is {self.overflow!r}; wanted 'error' or 'drop'.", "overflow")
        if self.session is not None and not (0 < len(self.session) <= 256 and self.session.isprintable()):
            raise SettingsError(
                f"session is {self.session!r:.80}; wanted a name of 1 to 256 printable characters.", "session"
            )
        reserved = RESERVED.intersection(self.chat_template_kwargs)
        if reserved:
            raise SettingsError(
                f"chat_template_kwargs has {sorted(reserved)}, which are not variables of a chat template. Leave them "
                "out; how a prompt ends is set with continue_final_message, and its tools with tools.",
                "chat_template_kwargs",
            )
        object.__setattr__(self, "options", _checked_options(self.options))
        object.__setattr__(self, "tools", mended_value(self.tools, "A tool"))
        whole = mended_value(self.chat_template_kwargs, "A variable of the chat template")
        object.__setattr__(self, "chat_template_kwargs", whole)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise SettingsError(
                f"stop is {self.stop!r:.80}; wanted texts of at least one character. Leave others out.", "stop"
            )
        object.__setattr__(self, "stop", tuple(whole_text(stop) for stop in stops))

    def _check(self, name: str) -> None:
        """Raise SettingsError for a field of the wrong type; replace None by an empty list or mapping."""
        value, (types, wanted) = getattr(self, name), _FIELD_TYPES.get(name, ((object,), ""))
        if value is None and types in (_LIST[0], _MAPPING[0]):
            object.__setattr__(self, name, () if types == _LIST[0] else {})
        elif value is not None and not isinstance(value, types):
            raise SettingsError(f"{name} is {value!r:.80}; wanted {wanted}.", name)


_RANGES: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    {
        "temperature": (0.0, math.inf, "a number, 0 or more"),
        "top_p": (0.0, 1.0, "a number from 0 to 1"),
        "min_p": (0.0, 1.0, "a number from 0 to 1"),
        "repetition_penalty": (1e-9, math.inf, "a number above 0"),
        "presence_penalty": (-math.inf, math.inf, "a number"),
        "frequency_penalty": (-math.inf, math.inf, "a number"),
    }
)
"""Options of sampling that are numbers: the least, the most, and both in words."""


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for `generate` whose whole numbers are floats where transformers takes nothing else.

    Raises:
        SettingsError: A number is outside of its range, or no number.
    """
    checked = dict(options)
    for name, (least, most, wanted) in _RANGES.items():
        value = checked.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
            raise SettingsError(f"{name} is {value!r:.80}; wanted {wanted}.", name)
        checked[name] = float(value)
    top_k = checked.get("top_k")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, Integral) or top_k < 0):
        raise SettingsError(f"top_k is {top_k!r:.80}; wanted a whole number, 0 (all tokens) or more.", "top_k")
    return checked
