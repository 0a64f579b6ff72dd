"""The request bodies of the server: OpenAI's fields, vLLM's, and our own, validated by pydantic.

A field is either honoured or refused: unknown fields are errors, and known ones that are not supported are accepted
only at values that change nothing (`OnlyValues`). Labels that never change an answer are accepted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

LONGEST_STOP = 256
"""Characters of a stop string."""
LONGEST_TITLE = 256
"""Characters of a document's title: it is kept with its chunk."""
MOST_CHOICES = 8
"""Answers to one request."""
SEED = 2**63
"""Seeds are from -SEED to SEED - 1."""

MOST_BIASES = 1024
"""Tokens that one request may bias."""

First = Field(fail_fast=True)
"""A list of which the first bad item is told: errors of thousands would take longer than the request."""
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]


@dataclass(frozen=True)
class OnlyValues:
    """Marks an unsupported field that is accepted only at values that change nothing, or null.

    Args:
        values: These values.
        do: What the error message advises instead.
    """

    values: tuple[Any, ...]
    do: str

    def checked(self, value: Any) -> Any:
        """The value; an error for any other than these."""
        if value is None or any(
            each == value and isinstance(each, bool) is isinstance(value, bool) for each in self.values
        ):
            return value
        wanted = " or ".join(map(json.dumps, (*self.values, None)))
        raise PydanticCustomError("only", "wanted {wanted}: {do}", {"wanted": wanted, "do": self.do})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """For pydantic, which asks for it."""
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        """For the OpenAPI document."""
        return {"enum": [*self.values, None]}


class RequestBody(BaseModel):
    """The base of request bodies: unknown fields, other types, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)


class Document(RequestBody):
    """A retrieved document. The model reads only `text`; `title` says where it is from, for people."""

    text: str = Field(min_length=1)
    title: str = Field(default="", max_length=LONGEST_TITLE)


class AnswerOptions(RequestBody):
    """Options of an answer beyond OpenAI's; None: the server's settings apply."""

    policy: str | None = None
    ratio: float | None = Field(default=None, ge=0, le=1)
    reuse: bool = True
    overflow: Literal["error", "drop"] | None = None
    deadline_s: float | None = Field(default=None, ge=0)
    blend: bool = False
    """For prompts in PML: recompute some tokens of modules, as for chunks."""


class StreamOptions(RequestBody):
    """What a stream tells besides its text."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, OnlyValues((False,), "pieces are sent as they are")] = None
    continuous_usage_stats: Annotated[Any, OnlyValues((False,), "usage comes once, with include_usage, at the end")] = (
        None
    )


class RequestToolCall(BaseModel):
    """A call of a tool that was made before."""

    model_config = ConfigDict(extra="ignore", strict=True)

    class Function(BaseModel):
        """What was called. arguments: JSON text of an object."""

        name: str
        arguments: str = "{}"

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ContentPart(BaseModel):
    """A part of a message's content. One of type "text-plain" is a document, as is a text that says so in `extras`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str
    text: str | None = None
    title: str | None = Field(default=None, max_length=LONGEST_TITLE)
    extras: dict[str, Any] | None = None


class RequestMessage(BaseModel):
    """One message. What a client's own answers carry besides is left unread."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], First] | None = None
    name: Annotated[str, Field(pattern=r"^[^\s<|\\/>\[\]]+$", max_length=64)] | None = None
    """Of a tool, or of whoever says it, for chat templates that write it."""
    reasoning_content: str | None = None
    """What an assistant thought before its answer, for chat templates that write it."""
    reasoning: str | None = None
    """The same, as some servers name it."""
    tool_calls: Annotated[list[RequestToolCall], First] | None = None
    tool_call_id: str | None = None
    function_call: RequestToolCall.Function | None = None
    """A call of one tool, as clients wrote it before there were several."""
    prefix: Annotated[Any, OnlyValues((False,), "continue_final_message goes on with a message")] = None
    partial: Annotated[Any, OnlyValues((False,), "continue_final_message goes on with a message")] = None


class CompletionRequest(RequestBody):
    """The fields that chat and text completions share."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    """None or 0: greedy decoding."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """Of the likeliest tokens, how many are drawn from; 0 and -1: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Tokens less likely than this share of the likeliest one are not drawn."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """What a token's logit loses if the answer has it already."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """What it loses for each time that the answer has it."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    """What logits of tokens in prompt or answer are divided by (those below zero multiplied)."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)] | None = None
    """By token id: what is added to its logit."""
    n: int | None = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] | None = None
    """Tokens that end an answer, like the model's own end tokens; the answer does not contain them."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Least tokens of an answer before it may end."""
    seed: int | None = Field(default=None, ge=-SEED, lt=SEED)
    documents: Annotated[list[str | Document], First] | None = Field(default=None, max_length=1000)
    """Retrieved documents, placed before the question; the KV of those seen before is reused."""
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    """The conversation of which this is the next turn."""
    pml: str | None = Field(default=None, min_length=1)
    """A prompt in PML for a registered schema; messages or prompt are appended to it as plain text."""
    ragfuse: AnswerOptions = AnswerOptions()

    # vLLM's words for response_format; one of them
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, max_length=1024)
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = Field(default=None, max_length=16)

    # labels, which change no answer anywhere
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None

    # taken at values that change nothing, refused at all others
    store: Annotated[Any, OnlyValues((False,), "answers are not kept to be fetched later; keep them yourself")] = None
    service_tier: Annotated[Any, OnlyValues(("auto", "default"), "all requests wait in one queue; leave it out")] = None
    best_of: Annotated[Any, OnlyValues((1,), "ask for n answers and choose among them")] = None
    use_beam_search: Annotated[Any, OnlyValues((False,), "answers are drawn token by token; leave it out")] = None
    length_penalty: Annotated[Any, OnlyValues((1.0,), "it is for beams, of which there are none; leave it out")] = None
    early_stopping: Annotated[Any, OnlyValues((False,), "it is for beams, of which there are none; leave it out")] = (
        None
    )
    typical_p: Annotated[Any, OnlyValues((1.0,), "draw by top_p, top_k or min_p")] = None
    ignore_eos: Annotated[Any, OnlyValues((False,), "ask for min_tokens, as many as max_tokens")] = None
    include_stop_str_in_output: Annotated[Any, OnlyValues((False,), "answers end before it; put it behind them")] = None
    skip_special_tokens: Annotated[Any, OnlyValues((True,), "special tokens are never text; leave it out")] = None
    spaces_between_special_tokens: Annotated[Any, OnlyValues((True, False), "give true or false")] = None
    allowed_token_ids: Annotated[
        Any, OnlyValues(([],), "hold the answer by response_format, or bias by logit_bias")
    ] = None
    bad_words: Annotated[Any, OnlyValues(([],), "bias their tokens by logit_bias, as -100")] = None
    prompt_logprobs: Annotated[Any, OnlyValues((), "ask /v1/completions with echo, logprobs and max_tokens 0")] = None
    truncate_prompt_tokens: Annotated[Any, OnlyValues((), 'ask with ragfuse: {"overflow": "drop"}')] = None
    return_token_ids: Annotated[Any, OnlyValues((False,), "logprobs name the tokens; leave it out")] = None
    return_tokens_as_token_ids: Annotated[Any, OnlyValues((False,), "logprobs name tokens by their text")] = None
    priority: Annotated[Any, OnlyValues((0,), "all requests wait in one queue; leave it out")] = None
    cache_salt: Annotated[Any, OnlyValues((), "what is kept is each key's own; ask with another key")] = None


class ChatRequest(CompletionRequest):
    """A request for an answer to messages."""

    messages: Annotated[list[RequestMessage], First]
    """At least one; none only beside `pml`."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: Annotated[Any, OnlyValues((["text"],), "answers are text; leave it out")] = None
    reasoning_effort: str | None = Field(default=None, max_length=64)
    """For templates that read it, as is `verbosity`; refused elsewhere."""
    verbosity: str | None = Field(default=None, max_length=64)
    enable_thinking: bool | None = None
    """One of `chat_template_kwargs`."""
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=32)
    """What the chat template is told besides; names that it does not read are refused."""
    continue_final_message: bool | None = False
    """Continue the last message, an assistant's, instead of answering it."""
    add_generation_prompt: bool | None = None
    """False beside `continue_final_message` alone."""

    # taken at values that change nothing, refused at all others
    echo: Annotated[Any, OnlyValues((False,), "ask /v1/completions for the prompt")] = None
    add_special_tokens: Annotated[Any, OnlyValues((False,), "the chat template writes them; leave it out")] = None
    include_reasoning: Annotated[
        Any, OnlyValues((True,), "leave reasoning_content unread, or give enable_thinking")
    ] = None
    functions: Annotated[Any, OnlyValues(([],), "send them as tools")] = None
    function_call: Annotated[Any, OnlyValues(("none", "auto"), "say it by tool_choice")] = None
    audio: Annotated[Any, OnlyValues((), "answers are text; leave it out")] = None
    prediction: Annotated[Any, OnlyValues((), "nothing is taken from it here; leave it out")] = None
    web_search_options: Annotated[Any, OnlyValues((), "nothing is looked up; send what was found as documents")] = None


class TextRequest(CompletionRequest):
    """A request for what follows one text, or each of several."""

    prompt: str | Several[str] | Ids | Several[Ids]
    """Texts, or token ids."""
    max_tokens: int | None = Field(default=None, ge=0)
    """0: nothing is written; with `echo` and `logprobs` the prompt is scored."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    """The prompt stands before the answer, its tokens among the `logprobs`."""
    suffix: Annotated[Any, OnlyValues(("",), "a text is continued, not filled in; leave it out")] = None
    add_special_tokens: Annotated[
        Any, OnlyValues((True,), "send the prompt as token ids, which are taken as they are")
    ] = None


class ErrorBody(BaseModel):
    """What is said instead of an answer."""

    class Error(BaseModel):
        """In words, and in OpenAI's. param: the field that is meant."""

        message: str
        type: str
        param: str | None
        code: str | None

    error: Error


class ExplainRequest(BaseModel):
    """A question whose plan is wanted: messages or a prompt, and the fields that bear on it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    messages: Annotated[list[RequestMessage], First] | None = None
    prompt: str | Ids | None = None
    documents: Annotated[list[str | Document], First] | None = Field(default=None, max_length=1000)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)
    verbosity: str | None = Field(default=None, max_length=64)
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=32)
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    pml: str | None = Field(default=None, min_length=1)
    ragfuse: AnswerOptions = AnswerOptions()


class SchemaRequest(RequestBody):
    """A schema in PML that is to be registered, in place of another one of its name."""

    pml: str = Field(min_length=1)
