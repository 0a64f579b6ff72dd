"""The LLM: LlamaIndex's completion and chat interfaces over a `ragfuse.Engine` or a server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import TokenAsyncGen
from llama_index.llms.ragfuse.convert import chat, completion, partial_chat, to_ragfuse_messages
from llama_index.llms.ragfuse.events import retrieved_for
from llama_index.llms.ragfuse.prompts import pml_of
from llama_index.llms.ragfuse.structured import Structured
from llama_index.llms.ragfuse.tools import ToolCalling
from llama_index.llms.ragfuse.trace_collector import note
from pydantic import SecretStr

import ragfuse
from ragfuse import Answer, Ask, PMLTemplate, Settings
from ragfuse.adapters import Answerer, Place, ask_of
from ragfuse.types.arguments import checks_arguments

T = TypeVar("T")


@checks_arguments
class RagFuseLLM(Structured, ToolCalling, CustomLLM):
    """An LLM that reuses the stored KV of retrieved nodes and computes only the rest of the prompt.

    Query engines need no change: retrieved nodes are recognised in the prompt's text. The weights
    are loaded on first use. LLMs of one process with equal model, dtype and device share the
    weights. With `base_url`, a server answers, and no weights are loaded in this process.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )

    model: Any = Field(default=None, alias="model_name")
    """Name of an included model, Hugging Face id, folder of a model or adapter, or GGUF file. Or a
    loaded model: a PreTrainedModel together with `tokenizer`, a pipeline, or a PEFT model. None
    means the model in the settings.
    """
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """The tokenizer of a loaded model."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options for loading the model: revision, trust_remote_code, attn_implementation,
    device_map, token, torch_dtype, quantization_config ...
    """
    dtype: str | None = None
    """The dtype of weights and KV. None means the dtype in the settings."""
    device: str | None = None
    """cpu, cuda or cuda:N. None means the device in the settings."""
    store: str | None = None
    """Folder of the chunk store. None means the folder in the settings."""
    settings: Settings | None = Field(default=None, exclude=True, repr=False)
    """All other settings. None means to read the environment, ragfuse.toml and the defaults."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An existing engine to use instead of an engine made from the fields above."""
    base_url: str | None = None
    """URL of a `ragfuse serve` server to use instead of an engine in this process."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """The server's API key. None means the key in RAGFUSE_API_KEY."""
    max_retries: int | None = Field(default=None, ge=0)
    """Maximum retries if the server is unreachable or busy. None means 2."""

    policy: str | None = None
    """Policy that selects which tokens of cached nodes are recomputed. None means the setting."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of the cached nodes' tokens to recompute, 0 to 1. None means the setting."""
    reuse: bool = True
    """False means full prefill without any reuse, for comparison."""

    temperature: float | None = Field(default=None, ge=0)
    """None or 0 means greedy decoding."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    """Minimum probability of a sampled token, relative to the most likely token's probability."""
    presence_penalty: float | None = None
    """Subtracted from the logit of each token that is already in the answer."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit for each occurrence of the token in the answer."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in the prompt or answer."""
    logit_bias: dict[int, float] | None = None
    """Numbers to add to tokens' logits, by token id."""
    max_tokens: int | None = None
    """Maximum tokens of an answer. None means the setting."""
    stop: list[str] | None = None
    """Stop strings. An answer ends before the first stop string in its text."""
    seed: int | None = None
    timeout: float | None = None
    """Maximum seconds of generation. An answer that takes longer ends unfinished."""
    deadline_s: float | None = Field(default=None, ge=0)
    """Seconds until the first token is wanted. To be in time, fewer tokens are recomputed, and KV
    from slow tiers is read at lossier codec levels.
    """
    context_window: int | None = None
    """Maximum tokens of prompt and answer. None means the model's context."""
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for transformers' `generate`."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template."""
    enable_thinking: bool | None = None
    """True if a reasoning model should think first. None means the chat template's default."""

    _place: Place = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Check the options, and find out which engine or server answers.

        The model is loaded on first use. A server is contacted on first use, too.

        Raises:
            SettingsError: An option is out of range.
            InputError: Fields contradict each other.
        """
        super().model_post_init(context)
        self._ask({})
        self._place = Place.of_fields(vars(self))
        self.engine = self.tokenizer = None
        self.settings = self._place.settings  # a copy is created from the fields
        if self._place.address is not None:
            self.base_url, self.model = (
                self._place.address.base_url,
                self._place.address.model or None,
            )
        self.model_kwargs = {
            name: value for name, value in self.model_kwargs.items() if name != "token"
        }
        if self.model is not None and not isinstance(self.model, str):
            self.model = str(self.model) if isinstance(self.model, Path) else None

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in serialised pipelines."""
        return "RagFuseLLM"

    @property
    def model_name(self) -> str:
        """The model's name. The name of a server's model is known after the first question."""
        return self._place.name

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return all fields and settings, from which `from_dict` recreates the LLM.

        Raises:
            SettingsError: The settings contain a secret, and secrets are not serialised.
            InputError: The model is a loaded object, which another process cannot load.
        """
        return {**super().to_dict(**kwargs), **self._place.as_public()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, without engine and weights. The copy loads the model again.

        Raises:
            InputError: The model is a loaded object, which another process cannot load.
        """
        self._place.check_movable()
        return super().__getstate__()

    def get_engine(self) -> Answerer:
        """Return the passed engine or client, else an engine or client that this process shares."""
        return self._place.engine()

    @property
    def metadata(self) -> LLMMetadata:
        """The model's limits and abilities, for LlamaIndex's prompt helpers and agents.

        Reading this property loads the model, or sends one request to the server.
        """
        card = self.get_engine().card
        return LLMMetadata(
            context_window=self.context_window or card.max_context or 4096,
            num_output=self.max_tokens or card.max_tokens,
            is_chat_model=card.has_chat_template,
            is_function_calling_model=card.has_chat_template,
            model_name=card.name,
        )

    def to_payload(self) -> dict[str, Any]:
        """Return a description of this LLM for events, without loading the model."""
        return {"class_name": self.class_name(), "model_name": self.model_name}

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text, which is sent as a user message.

        The answer continues the text if `formatted` is True or the model has no chat template.
        Keyword arguments override this LLM's fields for one call. `response_format` and
        `tool_choice` are as in OpenAI's API.
        """
        return _last(self._completions(prompt, formatted, self._ask(kwargs, prompt)))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Stream the answer of `complete`. The final response has usage and trace."""
        return self._completions(prompt, formatted, self._ask(kwargs, prompt))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, rendered by the model's chat template if it has one.

        Keyword arguments override this LLM's fields for one call. `tools` and further options are
        as in OpenAI's API.
        """
        return _last(self._chats(messages, self._ask(kwargs, messages)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer of `chat`. The final response has usage and trace."""
        return self._chats(messages, self._ask(kwargs, messages))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Answer like `complete`, without blocking the event loop. Cancelling stops generation."""
        return await _alast(self._acompletions(prompt, formatted, self._ask(kwargs, prompt)))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Stream like `stream_complete`, without blocking the event loop."""
        return self._acompletions(prompt, formatted, self._ask(kwargs, prompt))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer like `chat`, without blocking the event loop. Cancelling stops generation."""
        return await _alast(self._achats(messages, self._ask(kwargs, messages)))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Stream like `stream_chat`, without blocking the event loop."""
        return self._achats(messages, self._ask(kwargs, messages))

    def _completions(self, prompt: str, formatted: bool, ask: Ask) -> CompletionResponseGen:
        with self._place.stream(partial(self._prompt, prompt, formatted), ask) as stream:
            streamed = ""
            for text in stream:
                streamed += text
                yield CompletionResponse(text=streamed, delta=text)
            yield completion(stream.answer, self._told(stream.answer, ask))

    async def _acompletions(
        self, prompt: str, formatted: bool, ask: Ask
    ) -> CompletionResponseAsyncGen:
        async with await self._place.astream(
            partial(self._prompt, prompt, formatted), ask
        ) as stream:
            streamed = ""
            async for text in stream:
                streamed += text
                yield CompletionResponse(text=streamed, delta=text)
            yield completion(stream.answer, self._told(stream.answer, ask))

    def _chats(self, messages: Sequence[ChatMessage], ask: Ask) -> ChatResponseGen:
        with self._place.stream(partial(self._messages, messages), ask) as stream:
            streamed = reasoning = ""
            for piece in stream.pieces():
                streamed, reasoning = _append_piece(streamed, reasoning, piece)
                yield partial_chat(streamed, reasoning, piece)
            yield chat(stream.answer, self._told(stream.answer, ask))

    async def _achats(self, messages: Sequence[ChatMessage], ask: Ask) -> ChatResponseAsyncGen:
        async with await self._place.astream(partial(self._messages, messages), ask) as stream:
            streamed = reasoning = ""
            async for piece in stream.apieces():
                streamed, reasoning = _append_piece(streamed, reasoning, piece)
                yield partial_chat(streamed, reasoning, piece)
            yield chat(stream.answer, self._told(stream.answer, ask))

    def _told(self, answer: Answer, ask: Ask) -> dict[str, Any]:
        """Return the `raw` metadata of an answer, and add the trace to the lists of `traces`."""
        note(answer.trace)
        reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        return {**self._place.told(answer, ask), **reasoning}

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Answer a prompt template filled with `prompt_args`, without blocking the event loop."""
        await asyncio.to_thread(lambda: self.metadata)
        return await super().apredict(prompt, **prompt_args)

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        """Stream the answer of `apredict`."""
        await asyncio.to_thread(lambda: self.metadata)
        return await super().astream(prompt, **prompt_args)

    def _extend_prompt(self, formatted_prompt: str) -> str:
        """Add the LLM's system prompt and query wrapper; InputError if a PML prompt changes."""
        extended: str = super()._extend_prompt(formatted_prompt)
        if isinstance(formatted_prompt, PMLTemplate.Filled) and extended is not formatted_prompt:
            raise PMLTemplate.alone(1)
        return extended

    def _prompt(self, prompt: str, formatted: bool, engine: Answerer) -> Any:
        """Return a prompt in the engine's form: a text, a user message, or a PML prompt."""
        if formatted or isinstance(prompt, PMLTemplate.Filled):
            return prompt
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return str(self.completion_to_prompt(prompt))
        return [ragfuse.ChatMessage("user", [prompt])] if engine.card.has_chat_template else prompt

    def _messages(self, messages: Sequence[ChatMessage], engine: Answerer) -> Any:
        """Return messages in the engine's form: ragfuse's messages, one text, or a PML prompt."""
        if (filled := pml_of(messages)) is not None:
            return filled
        converted = to_ragfuse_messages(messages)
        if engine.card.has_chat_template or self.messages_to_prompt is None:
            return converted
        return str(self.messages_to_prompt(messages))

    def _ask(self, call: Mapping[str, Any], prompt: str | Sequence[ChatMessage] = "") -> Ask:
        """Return the options of a call, with the nodes retrieved for `prompt`.

        Arguments of the call override fields of this LLM.

        Raises:
            SettingsError: An argument is unknown, or a value is out of range.
        """
        given = {name: value for name, value in call.items() if name != "tools"}
        documents = retrieved_for(prompt) if prompt and self._place.hears_retrievers else ()
        return ask_of(type(self).__name__, vars(self), given, call.get("tools") or (), documents)


def _last(responses: Iterator[T]) -> T:
    """Return the final response of a stream, which has the whole answer."""
    return deque(responses, maxlen=1).pop()


async def _alast(responses: AsyncIterator[T]) -> T:
    """Return the final response of a stream. Cancelling the wait stops the generation."""
    last = [await anext(responses)]
    async for response in responses:
        last = [response]
    return last[0]


def _append_piece(text: str, reasoning: str, piece: Any) -> tuple[str, str]:
    """Return text and reasoning, with a piece appended to the text or to the reasoning."""
    return (text + piece, reasoning) if isinstance(piece, str) else (text, reasoning + piece.text)
