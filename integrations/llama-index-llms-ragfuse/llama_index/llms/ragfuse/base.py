"""The LLM: LlamaIndex's completion and chat interfaces, answered by `ragfuse.Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

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
from llama_index.llms.ragfuse.convert import chat, completion, partly, turns_of
from llama_index.llms.ragfuse.events import retrieved_for
from llama_index.llms.ragfuse.prompts import pml_of, ready
from llama_index.llms.ragfuse.structured import Structured
from llama_index.llms.ragfuse.tools import ToolCalling

import ragfuse
from ragfuse import Answer, AnswerStream, Ask, Engine, InputError, PMLTemplate, Settings

Prompt = Any
"""A prompt as an engine takes it: a text, messages, or a prompt in PML."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
ENDS = ("max_tokens", "stop", "timeout", "deadline_s")
TEMPLATE = ("chat_template_kwargs", "enable_thinking", "continue_final_message")
SAID = ("policy", "ratio", "reuse", "overflow", *ENDS, "seed", "generate_kwargs")
FIELDS = (*SAID, *SAMPLING, *PENALTIES, *TEMPLATE)
"""Fields that a call may override: `llm.chat(messages, ratio=1.0)`."""
PER_CALL = MappingProxyType({"tools": (), "tool_choice": "auto", "parallel_tool_calls": True, "grammar": None})
"""Options that only a call has, with their defaults."""


class RagFuseLLM(Structured, ToolCalling, CustomLLM):
    """A local LLM that reuses the stored KV of retrieved nodes and computes only the rest of the prompt.

    Any query engine works unchanged: precomputed nodes are found in the text of the prompt. The weights are loaded at
    first use and shared by all LLMs of the process with the same model, dtype and device.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )

    model: Any = Field(
        default=None,
        alias="model_name",
        description="Embedded name, hub id, folder (of an adapter, too) or GGUF file; or what is loaded already: a "
        "PreTrainedModel beside tokenizer, a pipeline, a PEFT model. None: what the settings say.",
    )
    tokenizer: Any = Field(default=None, exclude=True, repr=False, description="Of a loaded model.")
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="What the model is loaded with: revision, trust_remote_code, attn_implementation, device_map, "
        "token, torch_dtype, quantization_config ...",
    )
    dtype: str | None = Field(default=None, description="Of weights and KV; None: what the settings say.")
    device: str | None = Field(default=None, description="cpu, cuda or cuda:N; None: what the settings say.")
    store: str | None = Field(default=None, description="Folder of the chunk store; None: what the settings say.")
    settings: Settings | None = Field(default=None, exclude=True, repr=False, description="Everything else to be set.")
    engine: Engine | None = Field(default=None, exclude=True, repr=False, description="A ready engine, used instead.")

    policy: str | None = Field(default=None, description="Selects the tokens of cached nodes to recompute.")
    ratio: float | None = Field(default=None, ge=0, le=1, description="Share of them: 0 plain reuse, 1 full prefill.")
    reuse: bool = Field(default=True, description="False: the model's own full prefill, for comparison.")
    overflow: Literal["error", "drop"] | None = Field(
        default=None, description="A prompt longer than the window: an error, or its last documents are left out."
    )

    temperature: float | None = Field(default=None, ge=0, description="None or 0: greedy.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = Field(default=None, description="Least share of the likeliest token's probability.")
    presence_penalty: float | None = Field(default=None, description="What a token loses that the answer has.")
    frequency_penalty: float | None = Field(default=None, description="What it loses for each time.")
    repetition_penalty: float | None = Field(default=None, description="Divides tokens of prompt and answer.")
    logit_bias: dict[int, float] | None = Field(default=None, description="By token id: what is added to its logit.")
    max_tokens: int | None = Field(default=None, description="New tokens of an answer.")
    stop: list[str] | None = Field(default=None, description="An answer ends before any of these.")
    seed: int | None = None
    timeout: float | None = Field(default=None, description="Seconds of writing after which an answer ends as it is.")
    deadline_s: float | None = Field(
        default=None,
        ge=0,
        description="Seconds until the first token is wanted: what a store brings over a slow line comes smaller, or "
        "is computed.",
    )
    context_window: int | None = Field(default=None, description="Tokens of prompt and answer; None: the model's own.")
    generate_kwargs: dict[str, Any] = Field(default_factory=dict, description="More options of transformers' generate.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Variables for the chat template.")
    enable_thinking: bool | None = Field(
        default=None, description="Whether the model thinks before it answers; None: as its chat template has it."
    )
    continue_final_message: bool = Field(
        default=False, description="The last message is the beginning of the answer, which goes on with it."
    )

    _settings: Settings = PrivateAttr()
    _given: Any = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Resolve the settings; model and store are opened at first use."""
        super().model_post_init(context)
        if self.engine is not None and (self.model_kwargs or self.tokenizer is not None):
            raise InputError("A ready engine has its model: leave out tokenizer= and model_kwargs=.")
        if self.model is not None and not isinstance(self.model, str):
            self._given = self.model if not isinstance(self.model, Path) else None
            self.model = str(self.model) if self._given is None else None
        self._settings = self.engine.settings if self.engine is not None else self._told()
        if self._given is not None or self.tokenizer is not None:
            self._settings = self._handed_over()
        if self.engine is not None:
            self.settings = self._settings
        self.model_kwargs = {name: value for name, value in self._settings.model_kwargs.items() if name != "token"}
        self.model, self.dtype, self.device = self._settings.model, self._settings.dtype, self._settings.device
        self.store = None if self._settings.store is None else str(self._settings.store)

    def _told(self) -> Settings:
        """Return the settings, with model, dtype, device, store and model_kwargs replaced by those of this LLM."""
        named = {"model": self.model, "dtype": self.dtype, "device": self.device, "store": self.store}
        given = {name: value for name, value in named.items() if value is not None}
        base = self.settings or Settings()
        if self.model_kwargs:
            given["model_kwargs"] = {**base.model_kwargs, **self.model_kwargs}
        return Settings(**{**base.model_dump(), **given}) if given else base

    def _handed_over(self) -> Settings:
        """Return the settings for a loaded model; raises InputError if other fields contradict it."""
        if self.engine is not None:
            raise InputError("A ready engine has its model: leave out model= and tokenizer=.")
        for name in ("dtype", "device"):
            if self._given is not None and getattr(self, name) is not None:
                raise InputError(f"A loaded model has its {name}: leave {name}= out, or name the model.")
        return Engine.shared(self._settings, self._given, tokenizer=self.tokenizer).settings

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in serialised pipelines."""
        return "RagFuseLLM"

    @property
    def model_name(self) -> str:
        """The model's name in the settings."""
        return self._settings.model

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return all fields and settings, from which `from_dict` makes the same LLM again.

        Raises:
            SettingsError: The settings contain a secret, which is not serialised.
            InputError: The model was passed as a loaded object, which another process cannot load.
        """
        if self._given is not None:
            raise InputError(
                f"{self.model_name} was handed over loaded, and cannot be written down. Save it to a folder and name "
                "that: model='folder'."
            )
        return {**super().to_dict(**kwargs), "settings": self._settings.as_public()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without engine and weights: a copy in another process loads its own.

        Raises:
            InputError: The model was passed as a loaded object, which another process cannot load.
        """
        if self._given is not None:
            raise InputError(
                f"{self.model_name} was handed over loaded, and no copy of it can be made for another process. Save it "
                "to a folder and name that: model='folder'."
            )
        bare: Any = self.model_copy(update={"engine": None}) if self.engine is not None else self
        return super(RagFuseLLM, bare).__getstate__()

    def get_engine(self) -> Engine:
        """Return the engine: the field `engine` if given, else the one that the process shares for these settings."""
        if self.engine is not None:
            return self.engine
        return Engine.shared(self._settings, self._given, tokenizer=self.tokenizer)

    @property
    def metadata(self) -> LLMMetadata:
        """The limits that LlamaIndex's prompt helpers use; loads the model."""
        model = self.get_engine().model
        return LLMMetadata(
            context_window=self.context_window or model.max_context or 4096,
            num_output=self.max_tokens or self._settings.max_tokens,
            is_chat_model=self._has_template,
            is_function_calling_model=self._has_template,
            model_name=self.model_name,
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

        def written() -> CompletionResponseGen:
            said = ""
            with engine.stream(self._prompt(prompt, formatted), ask) as stream:
                for text in stream:
                    said += text
                    yield CompletionResponse(text=said, delta=text)
                yield completion(stream.answer, engine, ask.reuse, stream.answer.text[len(said) :])

        return written()

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

        def written() -> ChatResponseGen:
            said = thought = ""
            with engine.stream(self._messages(messages), ask) as stream:
                for piece in stream.pieces():
                    said, thought = _with(said, thought, piece)
                    yield partly(said, thought, piece)
                yield chat(stream.answer, engine, ask.reuse, stream.answer.text[len(said) :])

        return written()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Run `complete` without blocking the event loop; cancelling it stops the generation."""
        ask, engine = self._ask(kwargs, prompt), await asyncio.to_thread(self._loaded)
        asked = await asyncio.to_thread(self._prompt, prompt, formatted)
        return completion(await _awaited(engine.stream(asked, ask)), engine, ask.reuse)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Run `stream_complete` without blocking the event loop."""
        ask, engine = self._ask(kwargs, prompt), await asyncio.to_thread(self._loaded)
        asked = await asyncio.to_thread(self._prompt, prompt, formatted)

        async def written() -> CompletionResponseAsyncGen:
            said, stream = "", engine.stream(asked, ask)
            try:
                async for text in stream:
                    said += text
                    yield CompletionResponse(text=said, delta=text)
                yield completion(stream.answer, engine, ask.reuse, stream.answer.text[len(said) :])
            finally:
                stream.cancel()

        return written()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Run `chat` without blocking the event loop; cancelling it stops the generation."""
        ask, engine = self._ask(kwargs, messages), await asyncio.to_thread(self._loaded)
        asked = await asyncio.to_thread(self._messages, messages)
        return chat(await _awaited(engine.stream(asked, ask)), engine, ask.reuse)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Run `stream_chat` without blocking the event loop."""
        ask, engine = self._ask(kwargs, messages), await asyncio.to_thread(self._loaded)
        asked = await asyncio.to_thread(self._messages, messages)

        async def written() -> ChatResponseAsyncGen:
            said, thought, stream = "", "", engine.stream(asked, ask)
            try:
                async for piece in stream.apieces():
                    said, thought = _with(said, thought, piece)
                    yield partly(said, thought, piece)
                yield chat(stream.answer, engine, ask.reuse, stream.answer.text[len(said) :])
            finally:
                stream.cancel()

        return written()

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
        return bool(getattr(self.get_engine().model.tokenizer, "chat_template", None))

    def _loaded(self) -> Engine:
        """Load the model if necessary and return the engine."""
        engine = self.get_engine()
        _ = engine.model
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
        turns = turns_of(messages)
        if self._has_template or self.messages_to_prompt is None:
            return turns
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
        said = {**{name: getattr(self, name) for name in FIELDS}, **PER_CALL, **call}
        return Ask(
            max_tokens=said["max_tokens"],
            policy=said["policy"],
            ratio=said["ratio"],
            reuse=said["reuse"],
            stop=said["stop"] or (),
            seed=said["seed"],
            deadline_s=said["deadline_s"],
            options=_options(said),
            tools=tuple(said["tools"] or ()),
            tool_choice=said["tool_choice"] or "auto",
            parallel_tool_calls=said["parallel_tool_calls"] is not False,
            grammar=said["grammar"],
            documents=() if self._settings.learn == "off" else retrieved_for(prompt),
            chat_template_kwargs=Ask.template_kwargs(vars(self), call),
            continue_final_message=bool(said["continue_final_message"]),
            **({"overflow": said["overflow"]} if said["overflow"] else {}),
        )


async def _awaited(stream: AnswerStream) -> Answer:
    """Wait for the whole answer; cancelling the wait stops the generation."""
    try:
        async for _ in stream:
            pass
    finally:
        stream.cancel()
    return stream.answer


def _with(said: str, thought: str, piece: Any) -> tuple[str, str]:
    """Return text and reasoning so far, with the next piece added to either."""
    return (said + piece, thought) if isinstance(piece, str) else (said, thought + piece.text)


def _options(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of transformers' `generate` that are not fields of `Ask`."""
    options: dict[str, Any] = {name: said[name] for name in PENALTIES if said[name] is not None}
    if said["temperature"]:
        options |= {name: said[name] for name in SAMPLING if said[name] is not None} | {"do_sample": True}
    if said["timeout"] is not None:
        options["max_time"] = said["timeout"]
    return {**options, **said["generate_kwargs"]}
