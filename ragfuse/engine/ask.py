"""The options of one answer (`Ask`) and the forms of a question. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeGuard, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from ragfuse.errors import InputError
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.schemas.pml import read_prompt
from ragfuse.text.chat_messages import ChatMessage, Content, Piece
from ragfuse.types.arguments import checks_arguments, refused_arguments
from ragfuse.types.choices import as_setting
from ragfuse.types.grammar import Grammar
from ragfuse.types.texts import whole_text, whole_value

ChatInput = str | Sequence[tuple[str, Content] | ChatMessage]
"""A text, or a list of messages: each is a (role, content) pair or a `ChatMessage`."""


Ids = Sequence[int]
"""A prompt as token ids, which are passed to the model unchanged."""


Question = ChatInput | Ids | PMLPrompt
"""A question: text or messages, token ids, or a PML prompt over a registered schema."""


def is_ids(question: object) -> TypeGuard[Ids]:
    """Return whether a question is a list of token ids."""
    if isinstance(question, str | PMLPrompt) or not isinstance(question, Sequence) or not question:
        return False
    return isinstance(question[0], Integral) and not isinstance(question[0], bool)


def mended_documents(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Replace invalid characters in (text, source) pairs; raise InputError for any other item."""
    for each in texts if isinstance(texts, Iterable) and not isinstance(texts, str) else (texts,):
        is_pair = isinstance(each, Sequence) and not isinstance(each, str) and len(each) == 2
        if not is_pair or not all(isinstance(part, str) for part in each):
            raise InputError(
                f"Documents must be a list of (text, source) pairs; an item is {each!r:.80}.",
                "documents",
            )
        source = whole_text(each[1])
        yield whole_text(each[0], f"'{source}'"), source


def texts_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts as a tuple. A single str counts as one text."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def prompts_of(prompts: Iterable[Question]) -> list[Question]:
    """Return the prompts of a batch as a list; raise InputError for a single prompt."""
    if isinstance(prompts, str | PMLPrompt) or not isinstance(prompts, Iterable):
        raise InputError(
            f"A batch must be a list of prompts, found {prompts!r:.80}. Pass [prompt].", "prompts"
        )
    return list(prompts)


def mended_question(question: Question) -> Question:
    """Return a question with invalid characters replaced (`types.texts.whole_text`)."""
    if isinstance(question, PMLPrompt) or is_ids(question):
        return question
    whole: ChatInput = whole_value(
        question if isinstance(question, str) else messages_of(question), "The prompt"
    )
    return whole


def messages_of(question: Question) -> list[ChatMessage]:
    """Return a question as messages; a text becomes one user message.

    Raises:
        InputError: The question is token ids or an empty list, or contains an invalid message.
    """
    if is_ids(question):
        raise InputError(
            "A prompt of token ids cannot have tools or a session. Pass messages instead."
        )
    question = cast(ChatInput, question)
    if not isinstance(question, str | Sequence):
        raise InputError(
            f"A question must be a text, a list of messages or token ids; found {question!r:.80}."
        )
    messages = [ChatMessage("user", question)] if isinstance(question, str) else list(question)
    if not messages:
        raise InputError(
            "There are no messages. Pass at least one message, such as ('user', 'a question')."
        )
    return [_message(each) for each in messages]


def question_of(prompt: Question | None, pml: Path | str | None) -> Question:
    """Return `prompt`, or parse `pml` (text or file); raise InputError if both or none is given."""
    if prompt is not None and pml is None:
        return prompt
    if pml is not None and prompt is None:
        return read_prompt(pml)
    raise InputError(
        f"Pass either a prompt or `pml`, found {'both' if pml is not None else 'neither'}."
    )


def _message(given: object) -> ChatMessage:
    is_pair = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2
    message = given if isinstance(given, ChatMessage) else ChatMessage(*given) if is_pair else None  # type: ignore[misc]
    if message is None or not isinstance(message.role, str) or not _is_content(message.content):
        raise InputError(
            "A message must be a pair such as ('user', 'a question'), or a ChatMessage whose"
            f" content is a text or a list of texts and `Piece`s; found {given!r:.80}."
        )
    return message


def _is_content(content: object) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, Sequence) and all(isinstance(each, str | Piece) for each in content)


NO_LIMIT = -1
"""Value of `max_tokens` that means: only the model's context limits the answer."""
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
"""Parameters of `apply_chat_template`, which cannot be names of template variables."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Names of options that affect only sampling, not greedy decoding."""
SAMPLED = (*SAMPLING, "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
"""Names of the options that `Ask.generate_options` reads."""
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


def _variables(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if reserved := RESERVED.intersection(given):
        raise ValueError(f"found {sorted(reserved)}, which ragfuse sets itself. Remove these names")
    return given


class _Sampling(BaseModel, extra="allow"):
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, allow_inf_nan=False)


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with numbers converted; raise SettingsError if one is out of range."""
    try:
        checked = _Sampling(**options)
    except ValidationError as error:
        raise refused_arguments(error, _Sampling) from None
    numbers = checked.model_dump(include=set(_Sampling.model_fields), exclude_unset=True)
    return {**options, **numbers}


def _stops(given: Any) -> Any:
    return whole_value((given,) if isinstance(given, str) else given or (), "A stop string")


def _mended(what: str, nothing: Any = ()) -> BeforeValidator:
    """Return a validator that maps None to `nothing` and replaces invalid characters in texts."""
    return BeforeValidator(lambda given: nothing if given is None else whole_value(given, what))


@checks_arguments
@dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
class Ask:
    """The options of one answer. If `max_tokens`, `policy` or `ratio` is None, the setting applies.

    Args:
        max_tokens: Maximum tokens of the answer; -1 means up to the model's context. A maximum that
            does not fit after the prompt raises OverlongError. If earlier turns may be dropped,
            only a maximum above the whole context raises the error.
        policy: The selection policy, which chooses the tokens to recompute in reused chunks.
        ratio: The share of tokens to recompute in reused chunks, from 0 to 1.
        reuse: False for a full prefill without any reuse, for comparison.
        stop: Stop strings, in addition to those of the model's generation config. The answer ends
            before the first stop string in its text. Stop strings have no effect in the prompt, in
            reasoning, in tool calls, or in an answer that is constrained by a grammar.
        seed: The seed for sampling.
        deadline_s: Maximum seconds from the question to the first token. If this machine's timings
            were measured, the ratio exceeds its default only as far as the deadline allows. If the
            deadline cannot be met, `LoadPlan.forecast.is_late` is True.
        options: Options of transformers' `generate`, and four more. OpenAI's `presence_penalty` and
            `frequency_penalty` count tokens of the answer only. OpenAI's `logit_bias` maps token
            ids to biases. `stop_token_ids` end the answer like the model's own end tokens.
        tools: Tools that the model may call, in OpenAI's format.
        tool_choice: "auto" (text or calls), "none", "required", or the name of the tool to call.
        parallel_tool_calls: False to allow at most one tool call.
        grammar: The grammar that the answer must match. If the grammar is a JSON schema, the answer
            may be a tool call instead.
        session: The name of a stored conversation that this question continues. The messages are
            a new turn, or the whole conversation if they include an assistant message.
        blend: True to let the policy recompute tokens of PML modules, as it does for chunks.
        documents: (text, source) of each document retrieved for the question. Documents found in
            the prompt are encoded after the answer, and recognised in later prompts.
        chat_template_kwargs: Variables of the chat template, such as {"enable_thinking": False}.
    """

    max_tokens: PositiveInt | Literal[-1] | None = None
    policy: Annotated[str, AfterValidator(as_setting)] | None = None
    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    reuse: bool = True
    stop: Annotated[
        Sequence[Annotated[str, Field(min_length=1)]],
        BeforeValidator(_stops),
        AfterValidator(tuple),
    ] = ()
    seed: int | None = None
    deadline_s: Annotated[float, Field(ge=0)] | None = None
    options: Annotated[
        Mapping[str, Any],
        BeforeValidator(lambda given: given or {}),
        AfterValidator(_checked_options),
    ] = field(default_factory=dict)
    tools: Annotated[Sequence[Any], _mended("A tool")] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    session: Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")] | None = (
        None
    )
    blend: bool = False
    documents: Annotated[Sequence[tuple[str, str]], _mended("A document")] = field(
        default=(), repr=False
    )
    chat_template_kwargs: Annotated[
        Mapping[str, Any],
        _mended("A variable of the chat template", NO_VARIABLES),
        AfterValidator(_variables),
    ] = field(default_factory=dict)

    @staticmethod
    def template_kwargs(*fields: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `chat_template_kwargs` and `enable_thinking` of several mappings.

        Args:
            fields: Mappings such as a model's fields and a call's arguments. Later mappings win.
        """
        found: dict[str, Any] = {}
        for each in fields:
            found |= each.get("chat_template_kwargs") or {}
            if each.get("enable_thinking") is not None:
                found["enable_thinking"] = each["enable_thinking"]
        return found

    @staticmethod
    def generate_options(values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert sampling and penalty arguments with OpenAI's names to the `options` of an `Ask`.

        Decoding is greedy if the temperature is None or 0. Values without effect, such as `top_p`
        without a temperature, are checked too.

        Args:
            values: A model's fields or a call's arguments. Only names in `SAMPLED` are read. A
                value of None counts as not given.

        Raises:
            SettingsError: A value is out of range or not a number.
        """
        checked = _checked_options(
            {name: values[name] for name in SAMPLED if values.get(name) is not None}
        )
        is_sampled = bool(checked.get("temperature"))
        options = {
            name: value for name, value in checked.items() if is_sampled or name not in SAMPLING
        }
        return {**options, **({"do_sample": True} if is_sampled else {})}

    @staticmethod
    def tool_choice_of(
        choice: str | bool | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """Convert OpenAI's and LangChain's forms of a tool choice to a value of `tool_choice`.

        Args:
            choice: "auto", "none" or "required"; "any" or True, which mean "required"; a tool's
                name, or a mapping that contains a tool's name.
            tools: The offered tools, in OpenAI's form.

        Returns:
            "auto", "none", "required" or a tool's name. The result is the tool's name if a call is
            required and there is only one tool. The name in `choice` is not checked.
        """
        if isinstance(choice, Mapping):
            function = choice.get("function")
            choice = (function if isinstance(function, Mapping) else choice).get(
                "name"
            ) or choice.get("type")
        if choice not in (True, "any", "required"):
            return str(choice or "auto")
        function = tools[0].get("function") if len(tools) == 1 else None
        return str(function.get("name")) if isinstance(function, Mapping) else "required"
