"""The request bodies, validated by pydantic: fields of OpenAI, vLLM and ragfuse.

A field that could change an answer is either used or rejected. Unknown fields are errors, unless
their value has no effect (`INERT`). Fields that only label a request, such as `user`, are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    TypeAdapter,
    model_validator,
)

from ragfuse.serve.refusals import unusable
from ragfuse.types.prompt import MAX_RETRIEVED, MAX_TITLE_CHARS

MAX_STOP_CHARS = 256
MAX_CHOICES = 8
SEED_LIMIT = 2**63
"""Seeds range from -SEED_LIMIT to SEED_LIMIT - 1."""

MAX_BIASES = 1024

FailFast = Field(fail_fast=True)
"""Only a list's first invalid item is reported, because collecting thousands of errors is slow."""
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=False)]
Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
Ids = Several[Id]
Text = Annotated[str, Field(min_length=1)]
Word = Annotated[str, Field(max_length=64)]
Share = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[int, Field(ge=-1)]
"""A maximum; -1 means that there is none."""
Tools = Annotated[list[dict[str, Any]], Field(max_length=128)]


def _document(given: Any) -> Any:
    return {"text": given} if isinstance(given, str) else given


def _parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given or []


INERT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "service_tier": ("auto", "default"),
        "best_of": (1,),
        "length_penalty": (1.0,),
        "typical_p": (1.0,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True, False),
        "add_special_tokens": (True,),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "function_call": ("none", "auto"),
    }
)
"""Accepted values of unknown fields, by field name. All other unknown fields must be falsy."""


class RequestBody(BaseModel):
    """The base of all request bodies. Wrong types, NaN, infinity and unknown fields are errors."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # attribute docstrings are in the OpenAPI document
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Drop unknown fields with no effect, or all unknown fields if another engine decodes."""
        if not isinstance(given, dict):
            return given
        params = given.get("kv_transfer_params")
        is_prefill = isinstance(params, dict) and bool(params.get("do_remote_decode"))

        def is_kept(name: str, value: Any) -> bool:
            if name in cls.model_fields:
                return True
            is_inert = value in INERT[name] if name in INERT else not value
            return not (is_prefill or value is None or is_inert)

        return {name: value for name, value in given.items() if is_kept(name, value)}


class LooseBody(BaseModel):
    """The base of messages, their parts and answer formats. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)


class Document(RequestBody):
    """A retrieved document. The model reads only `text`. The `title` names the source."""

    text: str = Field(pattern=r"\S")
    title: str = Field(default="", max_length=MAX_TITLE_CHARS)


Documents = Annotated[
    list[Annotated[Document, BeforeValidator(_document, json_schema_input_type=str | Document)]],
    Field(max_length=1000, fail_fast=True),
]
"""Retrieved documents, as objects or texts. The documents precede the question as chunks."""


class AnswerOptions(RequestBody):
    """Options that only ragfuse has. If `policy` or `ratio` is null, the server chooses it."""

    policy: str | None = None
    ratio: Share | None = None
    reuse: bool = True
    deadline_s: float | None = Field(default=None, ge=0)
    blend: bool = False
    """If true, some tokens of a PML prompt's modules are recomputed, like those of chunks."""
    retrieved: Annotated[list[Document], FailFast] = Field(default=[], max_length=MAX_RETRIEVED)
    """Retrieved documents whose text the prompt already contains: whole, cut or altered."""
    max_time_s: float | None = Field(default=None, ge=0)
    """Maximum seconds of generation. An answer that takes longer ends unfinished."""
    model_sampling: bool = False
    """If true and the request has no top_k, the top_k of the model's generation config applies."""
    token_ids: bool = False
    """If true, each choice has its token ids. In a stream, the choice's final event has the ids."""
    token_trace: bool = False
    """If true, the trace has each prompt token's text and fate (fresh, reused, recomputed)."""


class StreamOptions(RequestBody):
    """Options of a streamed response."""

    include_usage: bool = False


class StructuredOutputs(RequestBody):
    """A constraint on the answer, in vLLM's format. At most one field may be set."""

    json_schema: dict[str, Any] | Json[dict[str, Any]] | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: Text | None = None


class RequestToolCall(LooseBody):
    """A tool call in a message of an earlier turn."""

    class Function(LooseBody):
        """The called function; `arguments` is a JSON object as text."""

        name: str
        arguments: str = "{}"

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ContentPart(LooseBody):
    """A part of a message: text, a document (text-plain), or the assistant's reasoning."""

    type: Literal["text", "input_text", "output_text", "text-plain", "reasoning_text", "refusal"]
    text: str = ""
    title: str | None = Field(default=None, max_length=MAX_TITLE_CHARS)


Parts = Annotated[
    list[ContentPart],
    FailFast,
    BeforeValidator(_parts, json_schema_input_type=str | list[ContentPart] | None),
]


class RequestMessage(LooseBody):
    """A message. Unknown fields are ignored, because clients send back whole answers."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Parts = []
    name: Annotated[str, Field(pattern=r"^[^\s<|\\/>\[\]]+$", max_length=64)] | None = None
    """The name of a tool or speaker, for chat templates that render such names."""
    reasoning_content: str | None = None
    """The assistant's reasoning, for chat templates that render reasoning."""
    reasoning: str | None = None
    """Other servers' name for `reasoning_content`. Used if `reasoning_content` is empty."""
    tool_calls: Annotated[list[RequestToolCall], FailFast] | None = None
    tool_call_id: str | None = None


class PlainFormat(LooseBody):
    """The format of an answer that is free text or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(LooseBody):
    """The format of an answer that matches a JSON schema."""

    class Named(LooseBody):
        """The JSON schema in the field `schema`. Other fields, such as `name`, are ignored."""

        json_schema: dict[str, Any] = Field(alias="schema")

    type: Literal["json_schema"]
    json_schema: Named


class AnswerBody(RequestBody):
    """Fields common to chat completions, text completions and responses."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 or null means greedy decoding."""
    top_p: Share | None = None
    seed: int | None = Field(default=None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    ragfuse: AnswerOptions = AnswerOptions()

    # labels without any effect on answers
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None


class CompletionRequest(AnswerBody):
    """Fields common to chat and text completions."""

    max_tokens: Limit | None = None
    """Maximum tokens of an answer. -1 means that only the model's context limits the answer."""
    top_k: Limit | None = None
    """The number of most likely tokens to sample from. 0 and -1 mean all tokens."""
    min_p: Share | None = None
    """Tokens with less than this share of the most likely token's probability are not sampled."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from a token's logit if the token is already in the answer."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from a token's logit once per occurrence of the token in the answer."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    """Divides positive logits and multiplies negative logits of tokens in the prompt or answer."""
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES)] | None = None
    """Numbers to add to tokens' logits, by token id."""
    n: int | None = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] | None = None
    """Ids of tokens that end an answer. The answer does not contain such a token."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Minimum tokens of an answer."""
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the stored conversation that this request continues or starts."""
    kv_transfer_params: dict[str, Any] | None = Field(default=None, max_length=32)
    """vLLM's field for disaggregated prefill. With do_remote_decode, another engine answers."""
    structured_outputs: StructuredOutputs | None = None


class ChatRequest(CompletionRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[RequestMessage], FailFast]
    """The conversation. The list may be empty if `pml` is given."""
    documents: Documents | None = None
    pml: Text | None = None
    """A PML prompt over a registered schema. The messages follow; their text is not read as PML."""
    max_completion_tokens: Limit | None = None
    """The newer name of `max_tokens`. If both are given, `max_completion_tokens` is used."""
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    reasoning_effort: Word | None = None
    """A variable of the chat template. The request fails if the template lacks the variable."""
    verbosity: Word | None = None
    enable_thinking: bool | None = None
    """A variable of the chat template. `chat_template_kwargs` may set it, too."""
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=32)
    """More variables of the chat template. The request fails if the template lacks a variable."""


class TextRequest(CompletionRequest):
    """The body of `/v1/completions`: one or more texts to continue."""

    prompt: str | Several[str] | Ids | Several[Ids]
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    logprobs: int | None = Field(default=None, ge=0, le=20)


class SchemaRequest(RequestBody):
    """A PML schema to register. A registered schema of the same name is replaced."""

    pml: Text


class TokensRequest(RequestBody):
    """The body of `/v1/ragfuse/tokens`: a text, or a prompt of messages, PML and tools."""

    text: str | None = None
    special: bool = False
    """If true, a special token's name in the text, such as "</s>", becomes that one token."""
    messages: Annotated[list[RequestMessage], FailFast] | None = None
    tools: Tools | None = None
    pml: Text | None = None


def _as_messages(given: Any) -> Any:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [_as_message(item) for item in given] if isinstance(given, list) else given


def _as_message(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": item}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output, id = item.get("output"), item.get("call_id")
        return {"role": "tool", "content": output, "tool_call_id": id}
    return {**item, "role": "assistant"} if kind == "reasoning" else item


Input = Annotated[
    list[RequestMessage],
    FailFast,
    BeforeValidator(_as_messages, json_schema_input_type=str | list[dict[str, Any]]),
]
"""A text, or a list of items: messages, tool calls, outputs of tools, and reasoning."""
INPUT: TypeAdapter[list[RequestMessage]] = TypeAdapter(Input)


class TextOptions(RequestBody):
    """The format and verbosity of the answer."""

    format: dict[str, Any] | None = None
    """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "schema": {...}}."""
    verbosity: Word | None = None


class ReasoningOptions(RequestBody):
    """The amount of reasoning before the answer, for chat templates with `reasoning_effort`."""

    effort: Word | None = None


class ResponseRequest(AnswerBody):
    """The body of `/v1/responses`."""

    input: Annotated[Input, Field(min_length=1)]
    documents: Documents | None = None
    instructions: str | None = None
    """A system message before the input. Earlier responses' instructions are not carried over."""
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=128)
    store: bool | None = True
    """If true, the response can be continued and fetched later."""
    max_output_tokens: Limit | None = None
    tools: Tools | None = None
    """Functions in flat form: {"type": "function", "name": ..., "parameters": {...}}."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Accepted but ignored: a prompt that is too long is always rejected."""


def chat_request_of(
    body: ResponseRequest, messages: Sequence[RequestMessage], session: str | None
) -> ChatRequest:
    """Convert the body of `/v1/responses` to a chat request.

    Args:
        body: The request's body.
        messages: The messages of the conversation so far, including the input.
        session: Name under which the conversation is stored. None means that it is not stored.

    Raises:
        APIError: A tool is not supported (400).
        ValidationError: The format of the answer is invalid.
    """
    told = body.instructions
    system = [RequestMessage.model_validate({"role": "system", "content": told})] if told else []
    options = body.ragfuse
    choice: Any = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    form = body.text.format if body.text is not None else None
    return ChatRequest.model_validate(
        {
            **body.model_dump(
                include={"model", "temperature", "top_p", "seed", "parallel_tool_calls"}
            ),
            "messages": [*system, *_joined(messages)],
            "max_tokens": body.max_output_tokens,
            "tools": [_nested(tool) for tool in body.tools or ()] or None,
            "tool_choice": choice,
            "response_format": {"type": form.get("type"), "json_schema": form} if form else None,
            "verbosity": body.text.verbosity if body.text is not None else None,
            "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
            "session_id": session,
            "ragfuse": options,
        }
    )


def _joined(messages: Sequence[RequestMessage]) -> Iterator[RequestMessage]:
    """Merge adjacent assistant messages, because each text and tool call is a separate item."""
    for is_assistants, group in groupby(messages, lambda message: message.role == "assistant"):
        first, *others = group
        if not is_assistants:
            yield from (first, *others)
            continue
        content, calls = [*first.content], [*(first.tool_calls or ())]
        for other in others:
            content += other.content
            calls += other.tool_calls or ()
        yield first.model_copy(update={"content": content, "tool_calls": calls})


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unusable(
            "tools",
            f"A tool has type {tool.get('type')!r:.40}. Use type 'function'.",
        )
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}
