"""What may be sent to the server: OpenAI's fields, and ours beside them. Values only, checked by pydantic.

Fields of OpenAI that change nothing here are taken; those that would change an answer in a way that this server cannot
give are refused by their value, and unknown ones by their name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

LONGEST_STOP = 256
"""Characters of a stop string."""
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
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]


class Body(BaseModel):
    """Whatever is sent: no other fields, and no other types, than are named; numbers that are numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)


class Document(Body):
    """A retrieved text. title: where it is from, for people; the model reads `text` alone."""

    text: str = Field(min_length=1)
    title: str = ""


class How(Body):
    """How a question is answered, beyond what OpenAI knows; None: what the server's settings say."""

    policy: str | None = None
    ratio: float | None = Field(default=None, ge=0, le=1)
    reuse: bool = True
    overflow: Literal["error", "drop"] | None = None
    deadline_s: float | None = Field(default=None, ge=0)
    blend: bool = False
    """Of prompts in PML: modules are blended, as chunks are."""


class StreamOptions(Body):
    """What a stream tells besides its text."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Call(BaseModel):
    """A call of a tool that was made before."""

    model_config = ConfigDict(extra="ignore", strict=True)

    class Function(BaseModel):
        """What was called. arguments: JSON text of an object."""

        name: str
        arguments: str = "{}"

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Part(BaseModel):
    """A part of a message's content. One of type "text-plain" is a document, as is a text that says so in `extras`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str
    text: str | None = None
    title: str | None = None
    extras: dict[str, Any] | None = None


class Message(BaseModel):
    """One message. What a client's own answers carry besides is left unread."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], First] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], First] | None = None
    tool_call_id: str | None = None


class Wanted(Body):
    """What both kinds of completion take."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    """None or 0: the likeliest tokens."""
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
    seed: int | None = Field(default=None, ge=-SEED, lt=SEED)
    documents: Annotated[list[str | Document], First] | None = Field(default=None, max_length=1000)
    """Retrieved texts, which stand before the question; those that were met before come from the store."""
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Whose turn of which conversation this is."""
    pml: str | None = Field(default=None, min_length=1)
    """A prompt in PML over a schema that is registered; what else is asked stands behind it, as text alone."""
    ragfuse: How = How()

    # taken, and of no consequence here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatRequest(Wanted):
    """A request for an answer to messages."""

    messages: Annotated[list[Message], First]
    """At least one; none only beside `pml`."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)
    """For templates that read it, as is `verbosity`; refused elsewhere."""
    verbosity: str | None = Field(default=None, max_length=64)
    enable_thinking: bool | None = None
    """One of `chat_template_kwargs`."""
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=32)
    """What the chat template is told besides; names that it does not read are refused."""
    continue_final_message: bool | None = False
    """The last message, an assistant's, is gone on with instead of answered."""
    add_generation_prompt: bool | None = None
    """False beside `continue_final_message` alone."""


class TextRequest(Wanted):
    """A request for what follows one text, or each of several."""

    prompt: str | Several[str] | Ids | Several[Ids]
    """Texts, or token ids."""
    max_tokens: int | None = Field(default=None, ge=0)
    """0: nothing is written; with `echo` and `logprobs` the prompt is scored."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    """The prompt stands before the answer, its tokens among the `logprobs`."""
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class Failed(BaseModel):
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

    messages: Annotated[list[Message], First] | None = None
    prompt: str | None = None
    documents: Annotated[list[str | Document], First] | None = Field(default=None, max_length=1000)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    max_tokens: int | None = Field(default=None, ge=1)
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    pml: str | None = Field(default=None, min_length=1)
    ragfuse: How = How()


class SchemaRequest(Body):
    """A schema in PML that is to be registered, in place of another one of its name."""

    pml: str = Field(min_length=1)
