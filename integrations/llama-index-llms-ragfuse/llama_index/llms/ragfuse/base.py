"""The LLM: LlamaIndex's completion and chat interfaces, answered by `ragfuse.Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

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
from llama_index.llms.ragfuse.places import ProcessPlace, ServerPlace
from llama_index.llms.ragfuse.prompts import pml_of, ready
from llama_index.llms.ragfuse.structured import Structured
from llama_index.llms.ragfuse.tools import ToolCalling
from pydantic import AfterValidator, SecretStr

import ragfuse
from ragfuse import Answer, AnswerStream, Ask, InputError, PMLTemplate, Settings
from ragfuse.remote import Answerer, RemoteEngine, is_answerer
from ragfuse.types.arguments import checks_arguments

Prompt = Any
"""A prompt as an engine takes it: a text, messages, or a prompt in PML."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
LENGTHS = ("max_tokens", "stop", "timeout", "deadline_s")
TEMPLATE = ("chat_template_kwargs", "enable_thinking", "continue_final_message")
REUSE_AND_LENGTH = ("policy", "ratio", "reuse", "overflow", *LENGTHS, "seed", "generate_kwargs")
FIELDS = (*REUSE_AND_LENGTH, *SAMPLING, *PENALTIES, *TEMPLATE)
"""Fields that a call may override: `llm.chat(messages, ratio=1.0)`."""
PER_CALL = MappingProxyType({"tools": (), "tool_choice": "auto", "parallel_tool_calls": True, "grammar": None})
"""Options that only a call has, with their defaults."""


def _checked_engine(engine: Any) -> Any:
    if engine is not None and not is_answerer(engine):
        raise ValueError(f"wanted a ragfuse.Engine or a ragfuse.RemoteEngine, found a {type(engine).__name__}")
    return engine


@checks_arguments
class RagFuseLLM(Structured, ToolCalling, CustomLLM):
    """A local LLM that reuses the stored KV of retrieved nodes and computes only the rest of the prompt.

    Any query engine works unchanged: precomputed nodes are found in the text of the prompt. The weights are loaded at
    first use and shared by all LLMs of the process with the same model, dtype and device. With `base_url` a server
    answers, and nothing is loaded here.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )

    model: Any = Field(
        default=None,
        alias="model_name",
        description="Name of an embedded model, Hugging Face id, folder (also of an adapter) or GGUF file; or a loaded "
        "model: a PreTrainedModel together with `tokenizer`, a pipeline, a PEFT model. None: as in the settings.",
    )
    tokenizer: Any = Field(default=None, exclude=True, repr=False, description="The tokenizer of a loaded model.")
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Options for loading the model: revision, trust_remote_code, attn_implementation, device_map, "
        "token, torch_dtype, quantization_config ...",
    )
    dtype: str | None = Field(default=None, description="The dtype of weights and KV; None: as in the settings.")
    device: str | None = Field(default=None, description="cpu, cuda or cuda:N; None: as in the settings.")
    store: str | None = Field(default=None, description="Folder of the chunk store; None: as in the settings.")
    settings: Settings | None = Field(default=None, exclude=True, repr=False, description="All other settings.")
    engine: Annotated[Any, AfterValidator(_checked_engine)] = Field(
        default=None, exclude=True, repr=False, description="An existing engine to use."
    )
    base_url: str | None = Field(
        default=None, description="Address of a `ragfuse serve` that answers instead of an engine in this process."
    )
    api_key: SecretStr | None = Field(
        default=None, exclude=True, repr=False, description="The server's API key; None: RAGFUSE_API_KEY."
    )
    max_retries: int | None = Field(
        default=None,
        ge=0,
        description="How often a request is sent again that found no server or a busy one; None: twice.",
    )

    policy: str | None = Field(default=None, description="How tokens of cached nodes are chosen to recompute.")
    ratio: float | None = Field(default=None, ge=0, le=1, description="Share of tokens to recompute, 0 to 1.")
    reuse: bool = Field(default=True, description="False: full prefill by the model itself, for comparison.")
    overflow: Literal["error", "drop"] | None = Field(
        default=None,
        description="For a prompt longer than the context window: raise an error, or drop its last documents.",
    )

    temperature: float | None = Field(default=None, ge=0, description="None or 0: greedy decoding.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = Field(default=None, description="Least probability, as a share of the most likely token's.")
    presence_penalty: float | None = Field(default=None, description="Subtracted from logits of tokens in the answer.")
    frequency_penalty: float | None = Field(default=None, description="Subtracted once for each time in the answer.")
    repetition_penalty: float | None = Field(default=None, description="Divides logits of tokens in prompt or answer.")
    logit_bias: dict[int, float] | None = Field(default=None, description="Added to the logits of these token ids.")
    max_tokens: int | None = Field(default=None, description="Most tokens of an answer.")
    stop: list[str] | None = Field(default=None, description="Strings before which an answer ends.")
    seed: int | None = None
    timeout: float | None = Field(
        default=None, description="Seconds of generation, after which an answer ends unfinished."
    )
    deadline_s: float | None = Field(
        default=None,
        ge=0,
        description="Seconds until the first token is wanted: KV from a slow store is then loaded at a smaller level "
        "or recomputed.",
    )
    context_window: int | None = Field(default=None, description="Most tokens of prompt and answer; None: the model's.")
    generate_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further options of transformers' generate."
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Variables for the chat template.")
    enable_thinking: bool | None = Field(
        default=None, description="Whether a reasoning model thinks before it answers; None: as its chat template does."
    )
    continue_final_message: bool = Field(
        default=False, description="Treat the last message as the beginning of the answer, which continues it."
    )

    _place: ProcessPlace | ServerPlace = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Check the options of answers, and resolve where the model is.

        It is loaded, or its server asked, at first use.

        Raises:
            SettingsError: An option is out of its range.
        """
        super().model_post_init(context)
        Ask.check_fields({name: getattr(self, name) for name in type(self).model_fields})
        is_remote = self.base_url is not None or isinstance(self.engine, RemoteEngine)
        self._place = ServerPlace.of(self) if is_remote else ProcessPlace.of(self)
        if self.engine is not None and isinstance(self._place, ProcessPlace):
            self.settings = self._place.settings
        for name, value in self._place.fields.items():
            setattr(self, name, value)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in serialised pipelines."""
        return "RagFuseLLM"

    @property
    def model_name(self) -> str:
        """The model's name in the settings; that of a server's is known after the first question."""
        return self._place.name

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return all fields and settings, from which `from_dict` makes the same LLM again.

        Raises:
            SettingsError: The settings contain a secret, which is not serialised.
            InputError: The model was passed as a loaded object, which another process cannot load.
        """
        if self._place.is_loaded_object:
            raise InputError(
                f"{self.model_name} was given as a loaded model, which cannot be serialised. Save it to a folder, and "
                "pass that: model='folder'."
            )
        return {**super().to_dict(**kwargs), **self._place.as_public()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without engine and weights: a copy in another process loads its own.

        Raises:
            InputError: The model was passed as a loaded object, which another process cannot load.
        """
        if self._place.is_loaded_object:
            raise InputError(
                f"{self.model_name} was given as a loaded model, which cannot be copied to another process. Save it "
                "to a folder, and pass that: model='folder'."
            )
        bare: Any = self.model_copy(update={"engine": None}) if self.engine is not None else self
        return super(RagFuseLLM, bare).__getstate__()

    def get_engine(self) -> Answerer:
        """Return what answers: the field `engine`, else an engine that the process shares, or a server's client."""
        return self._place.engine(self.engine)

    @property
    def metadata(self) -> LLMMetadata:
        """The limits that LlamaIndex's prompt helpers use; loads the model, or asks the server once."""
        card = self.get_engine().card
        return LLMMetadata(
            context_window=self.context_window or card.max_context or 4096,
            num_output=self.max_tokens or card.max_tokens,
            is_chat_model=card.has_chat_template,
            is_function_calling_model=card.has_chat_template,
            model_name=card.name,
        )

    def to_payload(self) -> dict[str, Any]:
        """Return the description of this LLM in events; unlike `metadata`, it does not load the model."""
        return {"class_name": self.class_name(), "model_name": self.model_name}

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text as a user message, or continue it if `formatted` or if the model has no chat template.

        Keyword arguments override fields of this LLM (`FIELDS`) for one call.
        """
        ask, engine = self._ask(kwargs, prompt), self.get_engine()
        return completion(engine.answer(self._prompt(prompt, formatted), ask), engine, ask.reuse)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Stream the answer of `complete`; the last response has usage and trace."""
        ask, engine = self._ask(kwargs, prompt), self.get_engine()

        def responses() -> CompletionResponseGen:
            streamed = ""
            with engine.stream(self._prompt(prompt, formatted), ask) as stream:
                for text in stream:
                    streamed += text
                    yield CompletionResponse(text=streamed, delta=text)
                yield completion(stream.answer, engine, ask.reuse, stream.answer.text[len(streamed) :])

        return responses()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, rendered by the model's chat template if it has one.

        Keyword arguments override fields of this LLM (`FIELDS`) for one call, or are options in `PER_CALL`.
        """
        ask, engine = self._ask(kwargs, messages), self.get_engine()
        return chat(engine.answer(self._messages(messages), ask), engine, ask.reuse)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer of `chat`; the last response has usage and trace."""
        ask, engine = self._ask(kwargs, messages), self.get_engine()

        def responses() -> ChatResponseGen:
            streamed = reasoning = ""
            with engine.stream(self._messages(messages), ask) as stream:
                for piece in stream.pieces():
                    streamed, reasoning = _append_piece(streamed, reasoning, piece)
                    yield partial_chat(streamed, reasoning, piece)
                yield chat(stream.answer, engine, ask.reuse, stream.answer.text[len(streamed) :])

        return responses()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Run `complete` without blocking the event loop; cancelling it stops the generation."""
        ask, engine = self._ask(kwargs, prompt), await asyncio.to_thread(self._loaded)
        ready_prompt = await asyncio.to_thread(self._prompt, prompt, formatted)
        return completion(await _whole_answer(engine.stream(ready_prompt, ask)), engine, ask.reuse)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Run `stream_complete` without blocking the event loop."""
        ask, engine = self._ask(kwargs, prompt), await asyncio.to_thread(self._loaded)
        ready_prompt = await asyncio.to_thread(self._prompt, prompt, formatted)

        async def responses() -> CompletionResponseAsyncGen:
            streamed, stream = "", engine.stream(ready_prompt, ask)
            try:
                async for text in stream:
                    streamed += text
                    yield CompletionResponse(text=streamed, delta=text)
                yield completion(stream.answer, engine, ask.reuse, stream.answer.text[len(streamed) :])
            finally:
                stream.cancel()

        return responses()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Run `chat` without blocking the event loop; cancelling it stops the generation."""
        ask, engine = self._ask(kwargs, messages), await asyncio.to_thread(self._loaded)
        ready_prompt = await asyncio.to_thread(self._messages, messages)
        return chat(await _whole_answer(engine.stream(ready_prompt, ask)), engine, ask.reuse)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Run `stream_chat` without blocking the event loop."""
        ask, engine = self._ask(kwargs, messages), await asyncio.to_thread(self._loaded)
        ready_prompt = await asyncio.to_thread(self._messages, messages)

        async def responses() -> ChatResponseAsyncGen:
            streamed, reasoning, stream = "", "", engine.stream(ready_prompt, ask)
            try:
                async for piece in stream.apieces():
                    streamed, reasoning = _append_piece(streamed, reasoning, piece)
                    yield partial_chat(streamed, reasoning, piece)
                yield chat(stream.answer, engine, ask.reuse, stream.answer.text[len(streamed) :])
            finally:
                stream.cancel()

        return responses()

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Answer a prompt template filled with `prompt_args`, without blocking the event loop."""
        await asyncio.to_thread(self._loaded)
        return await super().apredict(prompt, **prompt_args)

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        """Stream the answer of `apredict`."""
        await asyncio.to_thread(self._loaded)
        return await super().astream(prompt, **prompt_args)

    def _extend_prompt(self, formatted_prompt: str) -> str:
        """Add the LLM's system prompt and wrapper; raises InputError for a PML prompt, to which none can be added."""
        extended: str = super()._extend_prompt(formatted_prompt)
        if isinstance(formatted_prompt, PMLTemplate.Filled) and extended is not formatted_prompt:
            raise PMLTemplate.alone(1)
        return extended

    @property
    def _has_template(self) -> bool:
        return self.get_engine().card.has_chat_template

    def _loaded(self) -> Answerer:
        """Load the model, or ask the server about it, if necessary; return what answers."""
        engine = self.get_engine()
        _ = engine.card
        return engine

    def _prompt(self, prompt: str, formatted: bool) -> Prompt:
        """Return a text for the engine: unchanged, as a user message, or as the PML prompt that it stands for."""
        if isinstance(prompt, PMLTemplate.Filled):
            return ready(prompt, self.get_engine())
        if formatted:
            return prompt
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return str(self.completion_to_prompt(prompt))
        return [ragfuse.ChatMessage("user", [prompt])] if self._has_template else prompt

    def _messages(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Return messages for the engine: as messages, as one text if there is no chat template, or as a PML prompt."""
        if (filled := pml_of(messages)) is not None:
            return ready(filled, self.get_engine())
        converted = to_ragfuse_messages(messages)
        if self._has_template or self.messages_to_prompt is None:
            return converted
        return str(self.messages_to_prompt(messages))

    def _ask(self, call: Mapping[str, Any], prompt: str | Sequence[ChatMessage] = "") -> Ask:
        """Return the options of a call: its arguments, this LLM's fields for all others, and what was retrieved for it.

        Raises:
            InputError: The call has an unknown argument.
        """
        unknown = sorted(set(call) - {*FIELDS, *PER_CALL})
        if unknown:
            raise InputError(
                f"RagFuseLLM takes no argument '{unknown[0]}' in a call; wanted one of "
                f"{', '.join((*FIELDS, *PER_CALL))}. Options of transformers' generate go into generate_kwargs={{...}}."
            )
        values = {**{name: getattr(self, name) for name in FIELDS}, **PER_CALL, **call}
        return Ask(
            max_tokens=values["max_tokens"],
            policy=values["policy"],
            ratio=values["ratio"],
            reuse=values["reuse"],
            stop=() if values["stop"] is None else values["stop"],
            seed=values["seed"],
            deadline_s=values["deadline_s"],
            options=_options(values),
            tools=tuple(values["tools"] or ()),
            tool_choice=values["tool_choice"] or "auto",
            parallel_tool_calls=values["parallel_tool_calls"] is not False,
            grammar=values["grammar"],
            documents=retrieved_for(prompt) if self._place.hears_retrievers else (),
            chat_template_kwargs=Ask.template_kwargs(vars(self), call),
            continue_final_message=bool(values["continue_final_message"]),
            **({"overflow": values["overflow"]} if values["overflow"] else {}),
        )


async def _whole_answer(stream: AnswerStream) -> Answer:
    """Wait for the whole answer; cancelling the wait stops the generation."""
    try:
        async for _ in stream:
            pass
    finally:
        stream.cancel()
    return stream.answer


def _append_piece(text: str, reasoning: str, piece: Any) -> tuple[str, str]:
    """Return text and reasoning so far, with the next piece added to either."""
    return (text + piece, reasoning) if isinstance(piece, str) else (text, reasoning + piece.text)


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of transformers' `generate` that are not fields of `Ask`."""
    options = Ask.generate_options({name: values[name] for name in (*SAMPLING, *PENALTIES)})
    if values["timeout"] is not None:
        options["max_time"] = values["timeout"]
    return {**options, **values["generate_kwargs"]}
