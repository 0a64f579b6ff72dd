"""How a question is to be answered, as options of `generate`; how long an answer may be, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal

from ragfuse.errors import InputError, OverlongError, SettingsError
from ragfuse.fuse.select import policy_named
from ragfuse.hf.handover import told
from ragfuse.hf.model import HFModel
from ragfuse.plan.controller import AUTO
from ragfuse.settings import Settings
from ragfuse.types.grammar import Grammar
from ragfuse.types.keys import whole_text

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
"""What `apply_chat_template` takes that is no variable of a chat template."""
_NAME, _NUMBER, _YES = ((str,), "a text"), ((Real,), "a number"), ((bool,), "True or False")
_LIST, _TABLE = ((Sequence,), "a list"), ((Mapping,), "a mapping")
_TAKEN: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        **dict.fromkeys(("policy", "session", "overflow", "tool_choice"), _NAME),
        **dict.fromkeys(("max_tokens", "seed"), ((Integral,), "a whole number")),
        **dict.fromkeys(("ratio", "deadline_s"), _NUMBER),
        **dict.fromkeys(("reuse", "parallel_tool_calls", "blend", "continue_final_message"), _YES),
        **dict.fromkeys(("stop", "tools", "documents"), _LIST),
        **dict.fromkeys(("options", "chat_template_kwargs"), _TABLE),
    }
)
"""What each field of an `Ask` takes."""


@dataclass(frozen=True)
class Ask:
    """How a question is to be answered; None means what the settings say.

    reuse False: the model's own full prefill, for comparison. deadline_s: seconds from the plan until the first token
    is wanted; on a measured machine it bounds how far loading may raise the ratio, and a plan that misses it says so.
    options: anything transformers' `generate` takes, and `presence_penalty`, `frequency_penalty` and `logit_bias` (by
    token id) as OpenAI has them: these penalties count the answer's own tokens; `stop_token_ids` end answers beside the
    model's own end tokens. overflow: "error" for a prompt that is
    too long, or "drop", which leaves out its last chunks until there is room for `max_tokens` of answer, or for a
    quarter of what the model takes.

    tools: what may be called, as OpenAI has it; tool_choice: "auto" (text or calls), "none", "required", or the one to
    call. parallel_tool_calls: False for one call at most. grammar: what the answer must follow; then it calls nothing.
    stop: an answer ends before any of these, or of those that the model's generation config names; they count in its
    text alone, never in the prompt, a thought, a call or a grammar's text.

    blend: of a prompt in PML, modules are blended as chunks are: rows of them are computed again, by policy and ratio.

    session: the name of a conversation that is kept, and that this question continues. Messages that hold an
    assistant's are all of it; others, and a text, are what is said next.

    documents: (text, source) of what was retrieved for the question. Each that stands in the prompt is encoded after
    the answer and known from then on, as if `Engine.know` had been told of it.

    chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}. continue_final_message:
    the last message is the beginning of the answer, which goes on with it.
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
        """Return `chat_template_kwargs` from fields of that name and `enable_thinking`; later ones count.

        Args:
            fields: A model's own, then those of a call.
        """
        found: dict[str, Any] = {}
        for each in fields:
            found |= each.get("chat_template_kwargs") or {}
            if each.get("enable_thinking") is not None:
                found["enable_thinking"] = each["enable_thinking"]
        return found

    def __post_init__(self) -> None:
        for each in fields(self):
            self._check(each.name)
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise SettingsError(f"The recompute ratio is {self.ratio}; wanted a share from 0 to 1.")
        if self.deadline_s is not None and not self.deadline_s >= 0:
            raise SettingsError(f"deadline_s is {self.deadline_s}; wanted seconds from 0 on.")
        if self.policy is not None:
            known_policy(self.policy)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SettingsError(f"max_tokens is {self.max_tokens}; wanted at least 1 new token.")
        if self.overflow not in (None, "error", "drop"):
            raise SettingsError(f"overflow is {self.overflow!r}; wanted 'error' or 'drop'.")
        if self.session is not None and not (0 < len(self.session) <= 256 and self.session.isprintable()):
            raise SettingsError(f"session is {self.session!r:.80}; wanted a name of 1 to 256 printable characters.")
        taken = RESERVED.intersection(self.chat_template_kwargs)
        if taken:
            raise SettingsError(
                f"chat_template_kwargs has {sorted(taken)}; wanted variables of the chat template alone. What ends a "
                "prompt is said by continue_final_message, which tools there are by tools."
            )
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", tuple(whole_text(stop) for stop in stops if stop))

    def _check(self, name: str) -> None:
        """SettingsError for a field of another type; None stands for what an empty one has."""
        value, (types, wanted) = getattr(self, name), _TAKEN.get(name, ((object,), ""))
        if value is None and types in (_LIST[0], _TABLE[0]):
            object.__setattr__(self, name, () if types == _LIST[0] else {})
        elif value is not None and not isinstance(value, types):
            raise SettingsError(f"{name} is {value!r:.80}; wanted {wanted}.")


def known_policy(name: str) -> None:
    """SettingsError for a name that is no selection policy."""
    if name != AUTO:
        policy_named(name)


def remaining_context(
    n_tokens: int, model: HFModel, what: str = "The prompt", so: str = "Take fewer or shorter chunks."
) -> int | None:
    """New tokens that fit behind so many, None without a limit; OverlongError when these do not fit themselves."""
    longest = model.max_context
    if longest is None:
        return None
    if n_tokens > longest:
        raise OverlongError(
            f"{what} does not fit: wanted at most {longest:,} tokens, which is what {model.name} was made for, "
            f"found {n_tokens:,}. {so}"
        )
    return longest - n_tokens + 1


def options_of(ask: Ask, settings: Settings, room: int | None = None) -> dict[str, Any]:
    """What `generate` is called with: greedy unless told otherwise, no longer than `room`. Stop strings and penalties
    are left to whoever calls it."""
    options = dict(ask.options)
    config = options.get("generation_config")
    if config is None:
        options.setdefault("do_sample", False)
    if not options.get("do_sample", getattr(config, "do_sample", False)):
        options = {"temperature": None, "top_p": None, "top_k": None, **options}
    if options.get("max_length") is None:
        asked = options.get("max_new_tokens") or ask.max_tokens or getattr(config, "max_new_tokens", None)
        limit = asked or settings.max_tokens
        options["max_new_tokens"] = limit if room is None else min(limit, room)
        least = options.get("min_new_tokens") or 0
        if least > options["max_new_tokens"]:
            raise InputError(
                f"An answer of {least} tokens at least (min_new_tokens) was asked for; it has room for "
                f"{options['max_new_tokens']} at most. Raise max_tokens, or ask with a shorter prompt."
            )
    return options


def sequences_per_prompt(options: Mapping[str, Any], model: HFModel) -> int:
    """How many sequences `generate` gives for each prompt."""
    return int(told("num_return_sequences", options, model) or 1)


def is_streamable(options: Mapping[str, Any], model: HFModel) -> bool:
    """Whether tokens come one after the other: `generate` streams neither beams nor several sequences."""
    return sequences_per_prompt(options, model) == 1 and is_single(options, model)


def is_single(options: Mapping[str, Any], model: HFModel) -> bool:
    """Whether each sequence grows by itself, not as one of several beams."""
    return int(told("num_beams", options, model) or 1) == 1


def is_sampled(options: Mapping[str, Any], model: HFModel) -> bool:
    """Whether tokens are drawn, not the likeliest ones taken."""
    return bool(told("do_sample", options, model))


def ends_of(model: HFModel, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, ...]:
    """Ids that end an answer, () where a model has none; those in `stop_token_ids` besides."""
    ends = told("eos_token_id", options, model)
    own = tuple(ends) if isinstance(ends, Sequence) else () if ends is None else (ends,)
    return tuple(dict.fromkeys((*own, *(options.get("stop_token_ids") or ()))))


def with_remaining_deadline(ask: Ask, spent_s: float) -> Ask:
    """The wish with what is left of its deadline, of which so much is spent."""
    return ask if ask.deadline_s is None else replace(ask, deadline_s=max(0.0, ask.deadline_s - spent_s))
