"""The chat model: LangChain's calls and parameters on one side, `ragfuse.Engine` on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr

from langchain_ragfuse.messages import turns_of
from ragfuse import Answer, Ask, Engine, InputError, Settings

SAMPLING = ("temperature", "top_p", "top_k")
PER_CALL = ("model", "policy", "ratio", "reuse", "max_tokens", *SAMPLING, "seed", "timeout", "model_kwargs")
"""Fields that a call may override: `llm.invoke(messages, ratio=1.0)` or `llm.bind(reuse=False)`."""


class ChatRagFuse(BaseChatModel):
    """A local chat model that takes the KV of retrieved chunks from a store and computes only what is new.

    Any prompt works unchanged: chunks that were indexed are found in its text. The weights are loaded at the first
    question and shared by all models of the process with the same name, dtype and device.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )

    model: str | None = Field(default=None, alias="model_name")
    """Embedded name, Hugging Face id or local folder; None: what the settings say."""
    dtype: str | None = None
    device: str | None = None
    store: Path | None = None
    """Folder of the chunk store; None: what the settings say."""
    settings: Settings | None = Field(default=None, repr=False)
    """Everything else that can be set; None: environment, ragfuse.toml, defaults."""
    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    """A ready engine, used instead of one made from the fields above."""

    policy: str | None = None
    """Which tokens of cached chunks are computed again; None: what the settings say."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of them, 0 (plain reuse) to 1 (full prefill); None: what the settings say."""
    reuse: bool = True
    """False: the model's own full prefill, for comparison."""

    temperature: float | None = None
    """None or 0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    timeout: float | None = None
    """Seconds for writing an answer, after which it ends as it is."""
    streaming: bool = False
    """Whether `invoke` streams too, for callbacks that listen to tokens."""
    max_retries: int | None = None
    """Taken for compatibility: a local model has nothing to retry, and needs no key."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further options of transformers' `generate`."""

    _settings: Settings = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Read the settings now; whatever they name is made when it is needed."""
        super().model_post_init(context)
        named = {"model": self.model, "dtype": self.dtype, "device": self.device, "store": self.store}
        given = {name: value for name, value in named.items() if value is not None}
        base = self.settings or (Settings() if self.engine is None else self.engine.settings)
        self._settings = base if self.engine is not None else _with(base, given)

    @property
    def model_name(self) -> str:
        """The model as it was named."""
        return self._settings.model

    def get_engine(self, model: str | None = None) -> Engine:
        """The engine behind this model: the one given, or the process's own for these settings."""
        if model in (None, self.model_name):
            return self.engine or Engine.shared(self._settings)
        return Engine.shared(_with(self._settings, {"model": model}))

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text by the model's own tokenizer."""
        return self.get_engine().tokens(text)

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages make, template included."""
        return len(self.get_engine().prompt(turns_of(messages)))

    @property
    def _llm_type(self) -> str:
        return "ragfuse-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        settings = self._settings
        ask = self._ask(None, {})
        return {
            "model": settings.model,
            "dtype": settings.dtype,
            "policy": ask.policy or settings.policy,
            "ratio": settings.ratio if ask.ratio is None else ask.ratio,
            "reuse": ask.reuse,
            "max_tokens": ask.max_tokens or settings.max_tokens,
            "seed": ask.seed,
            "stop": list(ask.stop),
            **ask.options,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"], params["ls_model_name"] = "ragfuse", kwargs.get("model") or self.model_name
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask, engine = self._ask(stop, kwargs), self.get_engine(kwargs.get("model"))
        return _result(engine.answer(turns_of(messages), ask), engine, ask)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        ask, said, engine = self._ask(stop, kwargs), "", self.get_engine(kwargs.get("model"))
        with engine.stream(turns_of(messages), ask) as stream:
            for text in stream:
                said += text
                chunk = _chunk(text)
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            yield _last(stream.answer, said, engine, ask)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask, turns = self._ask(stop, kwargs), turns_of(messages)
        engine = await asyncio.to_thread(self.get_engine, kwargs.get("model"))
        stream = engine.stream(turns, ask)
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()
        return _result(stream.answer, engine, ask)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        ask, turns, said = self._ask(stop, kwargs), turns_of(messages), ""
        engine = await asyncio.to_thread(self.get_engine, kwargs.get("model"))
        stream = engine.stream(turns, ask)
        try:
            async for text in stream:
                said += text
                chunk = _chunk(text)
                if run_manager:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            yield _last(stream.answer, said, engine, ask)
        finally:
            stream.cancel()

    def _ask(self, stop: Sequence[str] | None, call: Mapping[str, Any]) -> Ask:
        """The fields of this model, where the call does not say otherwise."""
        unknown = sorted(set(call) - set(PER_CALL))
        if unknown:
            raise InputError(
                f"ChatRagFuse takes no argument '{unknown[0]}' in a call; wanted {', '.join(PER_CALL)} or stop. "
                "Options of transformers' generate go into model_kwargs={...}."
            )
        said: Callable[[str], Any] = lambda name: call[name] if name in call else getattr(self, name)  # noqa: E731
        return Ask(
            max_tokens=said("max_tokens"),
            policy=said("policy"),
            ratio=said("ratio"),
            reuse=said("reuse"),
            stop=tuple(self.stop or () if stop is None else stop),
            seed=said("seed"),
            options=_options(said),
        )


def _result(answer: Answer, engine: Engine, ask: Ask) -> ChatResult:
    message = AIMessage(
        answer.text, response_metadata=_metadata(answer, engine), usage_metadata=_usage(answer, engine, ask)
    )
    info = {"finish_reason": answer.finish_reason}
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])


def _last(answer: Answer, said: str, engine: Engine, ask: Ask) -> ChatGenerationChunk:
    """What of the text was not said yet (all of it with beams), usage and trace."""
    message = AIMessageChunk(
        content=answer.text[len(said) :],
        response_metadata=_metadata(answer, engine),
        usage_metadata=_usage(answer, engine, ask),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": answer.finish_reason})


def _metadata(answer: Answer, engine: Engine) -> dict[str, Any]:
    return {
        "model_name": engine.settings.model,
        "model_provider": "ragfuse",
        "finish_reason": answer.finish_reason,
        "ragfuse": answer.trace.as_dict(),
    }


def _usage(answer: Answer, engine: Engine, ask: Ask) -> UsageMetadata:
    """Tokens; cache_read: taken from the store as they were, cache_creation: encoded for next time."""
    trace = answer.trace
    saves = ask.reuse and not engine.model.profile.refusal
    missed = sum(segment.n_tokens for segment in trace.segments if not segment.hit)
    return UsageMetadata(
        input_tokens=trace.tokens,
        output_tokens=len(answer.token_ids),
        total_tokens=trace.tokens + len(answer.token_ids),
        input_token_details=InputTokenDetails(cache_read=trace.tokens_reused, cache_creation=missed if saves else 0),
    )


def _with(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """The same settings, some of them otherwise."""
    return Settings(**{**settings.model_dump(), **given}) if given else settings


def _chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def _options(said: Callable[[str], Any]) -> dict[str, Any]:
    """Options of transformers' `generate` besides those that Ask names."""
    options: dict[str, Any] = {}
    if said("temperature"):
        options = {name: said(name) for name in SAMPLING if said(name) is not None} | {"do_sample": True}
    if said("timeout") is not None:
        options["max_time"] = said("timeout")
    return {**options, **said("model_kwargs")}
