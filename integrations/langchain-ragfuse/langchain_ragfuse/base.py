"""The base of the chat model and the text model: their fields, their engine, and the options of a call as an `Ask`.

`chat_models.py` and `llms.py` turn answers into LangChain's messages and generations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_serializer

from langchain_ragfuse.callbacks import retrieved_for
from ragfuse import Answer, AnswerStream, Ask, Engine, Grammar, InputError, Settings

CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid", populate_by_name=True, protected_namespaces=())
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
OVERRIDES = (
    "policy",
    "ratio",
    "reuse",
    "max_tokens",
    *SAMPLING,
    *PENALTIES,
    "seed",
    "timeout",
    "overflow",
    "deadline_s",
    "grammar",
    "chat_template_kwargs",
    "enable_thinking",
    "continue_final_message",
)
PER_CALL = ("model", *OVERRIDES, "model_kwargs", "response_format", "stream")
"""Options of one call: `llm.invoke(messages, ratio=1.0)` or `llm.bind(reuse=False)`."""


class RagFuseModel(BaseModel):
    """The fields that `ChatRagFuse` and `RagFuseLLM` share.

    The weights are loaded at the first question and shared by all models of the process with the same name, dtype and
    device.
    """

    model_config = CONFIG

    model: Any = Field(default=None, alias="model_name")
    """Name of an embedded model, Hugging Face id, folder (also of an adapter) or GGUF file; or a loaded model: a
    `PreTrainedModel` together with `tokenizer`, a `pipeline`, a PEFT model. None: the model in the settings."""
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """The tokenizer of a loaded model."""
    dtype: str | None = None
    device: str | None = None
    store: Path | None = None
    """Folder of the chunk store; None: the folder in the settings."""
    settings: Settings | None = Field(default=None, repr=False)
    """All other settings; None: from the environment, ragfuse.toml and the defaults."""
    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    """An existing engine, used instead of one made from the fields above."""

    policy: str | None = None
    """Selects the tokens of cached chunks to recompute; None: the policy in the settings."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of tokens to recompute, 0 (plain reuse) to 1 (full prefill); None: the ratio in the settings."""
    reuse: bool = True
    """False: a full prefill by the model itself, for comparison."""
    overflow: Literal["error", "drop"] | None = None
    """If a prompt is longer than the context window: raise an error, or drop its last documents; None: as in the
    settings."""

    temperature: float | None = Field(default=None, ge=0)
    """None or 0: greedy decoding."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    """Tokens with less than this share of the most likely token's probability are not sampled."""
    presence_penalty: float | None = None
    """Subtracted from the logit of each token that the answer contains already."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit once for each time that the answer contains it."""
    repetition_penalty: float | None = None
    """Positive logits of tokens in prompt or answer are divided by it, negative ones multiplied."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids."""
    max_tokens: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    timeout: float | None = None
    """Seconds of generation, after which the answer ends unfinished."""
    deadline_s: float | None = Field(default=None, ge=0)
    """Seconds until the first token is wanted: KV from a slow store is then loaded at a smaller level or recomputed."""
    grammar: Grammar | None = Field(default=None, repr=False)
    """A grammar that constrains every answer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template."""
    enable_thinking: bool | None = None
    """Whether a reasoning model thinks before it answers; None: the default of its chat template."""
    continue_final_message: bool = False
    """Treat the last message as the beginning of the answer, which continues it."""
    streaming: bool = False
    """Whether `invoke` also streams, for callbacks that receive single tokens."""
    max_retries: int | None = None
    """Ignored, like `api_key`; accepted for compatibility, as a local model needs neither."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options for loading the model (revision, trust_remote_code, attn_implementation, device_map, token, torch_dtype,
    quantization_config, ...); all others are passed to transformers' `generate`."""

    _settings: Settings = PrivateAttr()
    _loaded_model: Any = PrivateAttr(default=None)

    @field_serializer("settings")
    def _public(self, settings: Settings | None) -> dict[str, Any] | None:
        """Serialise the settings; raises SettingsError if they contain a secret."""
        return None if settings is None else settings.as_public()

    def model_post_init(self, context: Any, /) -> None:
        """Resolve the settings; model and store are opened at first use."""
        super().model_post_init(context)
        loading = {name: value for name, value in self.model_kwargs.items() if name in Settings.LOADING}
        self.model_kwargs = {name: value for name, value in self.model_kwargs.items() if name not in Settings.LOADING}
        base = self.settings or (Settings() if self.engine is None else self.engine.settings)
        if self.model is not None and not isinstance(self.model, str):
            self._loaded_model = self.model if not isinstance(self.model, Path) else None
            self.model = str(self.model) if self._loaded_model is None else None
        named = {"model": self.model, "dtype": self.dtype, "device": self.device, "store": self.store}
        given = {name: value for name, value in named.items() if value is not None}
        if loading:
            given["model_kwargs"] = {**base.model_kwargs, **loading}
        self._settings = base if self.engine is not None else _with(base, given)
        if self._loaded_model is not None or self.tokenizer is not None or (self.engine is not None and loading):
            self._adopt_loaded_model(loading)

    def _adopt_loaded_model(self, loading: Mapping[str, Any]) -> None:
        """Check a loaded model and take over its settings; raises InputError if other fields contradict it."""
        if self.engine is not None:
            raise InputError(
                "An engine already has its model: with engine=, leave out model=, tokenizer= and loading options."
            )
        for name in ("dtype", "device"):
            if self._loaded_model is not None and getattr(self, name) is not None:
                raise InputError(
                    f"A loaded model already has its {name}: leave out {name}=, or pass the model's name instead."
                )
        engine = Engine.shared(self._settings, self._loaded_model, tokenizer=self.tokenizer)
        self._settings = engine.settings

    @property
    def model_name(self) -> str:
        """The model's name in the settings."""
        return self._settings.model

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without engine and weights: a copy in another process loads its own.

        Raises:
            InputError: The model was passed as a loaded object, which another process cannot load.
        """
        if self._loaded_model is not None:
            raise InputError(
                f"{self.model_name} was given as a loaded model, which cannot be copied to another process. Save it "
                "to a folder, and pass that: model='folder'."
            )
        bare = self.model_copy(update={"engine": None}) if self.engine is not None else self
        return super(RagFuseModel, bare).__getstate__()

    def get_engine(self, model: str | None = None) -> Engine:
        """Return the engine: the field `engine` if given, else the one that the process shares for these settings.

        Args:
            model: Name of another model, for a call with `model=`; None: this one.
        """
        if model in (None, self.model_name):
            return self.engine or Engine.shared(self._settings, self._loaded_model, tokenizer=self.tokenizer)
        return Engine.shared(_with(self._settings, {"model": model}))

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text by the model's tokenizer."""
        return self.get_engine().tokens(text)

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
            "overflow": ask.overflow or settings.overflow,
            "max_tokens": ask.max_tokens or settings.max_tokens,
            "seed": ask.seed,
            "stop_sequences": list(ask.stop),  # LangChain would overwrite a `stop` by that of the call
            **({"deadline_s": ask.deadline_s} if ask.deadline_s is not None else {}),
            **({"grammar": repr(ask.grammar)} if ask.grammar is not None else {}),
            **({"chat_template_kwargs": dict(ask.chat_template_kwargs)} if ask.chat_template_kwargs else {}),
            **({"continue_final_message": True} if ask.continue_final_message else {}),
            **ask.options,
        }

    def _traced(self, params: Any, call: Mapping[str, Any]) -> Any:
        """Return LangSmith's parameters with the actual provider and model."""
        return {**params, "ls_provider": "ragfuse", "ls_model_name": call.get("model") or self.model_name}

    def _retrieved(self, run_manager: Any, prompts: Sequence[Any]) -> tuple[tuple[str, str], ...]:
        """Return (text, source) of what was retrieved for messages or prompts; () if the setting `learn` is "off"."""
        return () if self._settings.learn == "off" else retrieved_for(run_manager, prompts)

    def _ask(
        self,
        stop: Sequence[str] | None,
        call: Mapping[str, Any],
        further: Sequence[str] = (),
        documents: Sequence[tuple[str, str]] = (),
    ) -> Ask:
        """Return the options of a call: its arguments, and the fields of this model for all that it does not set.

        Args:
            stop: Stop strings of the call; None: those of this model.
            call: Keyword arguments of the call.
            further: Names of further arguments that are allowed because the caller handles them.
            documents: (text, source) of what was retrieved for the call.

        Raises:
            InputError: The call has an unknown argument.
        """
        allowed = (*PER_CALL, *further)
        unknown = sorted(set(call) - set(allowed))
        if unknown:
            raise InputError(
                f"{type(self).__name__} takes no argument '{unknown[0]}' in a call; wanted {', '.join(allowed)} or "
                "stop. Options of transformers' `generate` go into model_kwargs={...}."
            )
        option: Callable[[str], Any] = lambda name: call[name] if name in call else getattr(self, name)  # noqa: E731
        return Ask(
            max_tokens=option("max_tokens"),
            policy=option("policy"),
            ratio=option("ratio"),
            reuse=option("reuse"),
            stop=(self.stop or ()) if stop is None else stop,
            seed=option("seed"),
            overflow=option("overflow"),
            deadline_s=option("deadline_s"),
            grammar=_grammar(call.get("response_format")) or option("grammar"),
            options=_options(option),
            documents=documents,
            chat_template_kwargs=Ask.template_kwargs(vars(self), call),
            continue_final_message=bool(option("continue_final_message")),
        )


def metadata_of(answer: Answer, engine: Engine) -> dict[str, Any]:
    """Return LangChain's response metadata of an answer; its key `ragfuse` holds the trace."""
    return {
        "model_name": engine.settings.model,
        "model_provider": "ragfuse",
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.finish_reason,
        "ragfuse": answer.trace.as_dict(),
    }


def usage_of(answer: Answer, engine: Engine, ask: Ask) -> UsageMetadata:
    """Return the token counts; cache_read: reused from the store, cache_creation: misses that are encoded for later."""
    trace = answer.trace
    saves = ask.reuse and not engine.model.profile.refusal
    missed = sum(segment.n_tokens for segment in trace.segments if not segment.hit)
    return UsageMetadata(
        input_tokens=trace.tokens,
        output_tokens=len(answer.token_ids),
        total_tokens=trace.tokens + len(answer.token_ids),
        input_token_details=InputTokenDetails(cache_read=trace.tokens_reused, cache_creation=missed if saves else 0),
    )


@asynccontextmanager
async def cancelled_at_exit(stream: AnswerStream) -> AsyncIterator[AnswerStream]:
    """Yield the stream and cancel its generation at exit, also after an error or a cancellation."""
    try:
        yield stream
    finally:
        stream.cancel()


def _grammar(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar that OpenAI's `response_format` stands for; None for plain text."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json(None)
    schema = (response_format.get("json_schema") or {}).get("schema")
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise InputError(
            f"response_format of type '{kind}' cannot be followed; wanted {{'type': 'json_object'}} or {{'type': "
            "'json_schema', 'json_schema': {'schema': {...}}}. Other grammars: grammar=ragfuse.Grammar.regex(...)."
        )
    return Grammar.json(schema)


def _with(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """Return a copy of the settings with some values replaced."""
    return Settings(**{**settings.model_dump(), **given}) if given else settings


def _options(option: Callable[[str], Any]) -> dict[str, Any]:
    """Return the options of transformers' `generate` that are not fields of `Ask`."""
    options: dict[str, Any] = {name: option(name) for name in PENALTIES if option(name) is not None}
    if option("temperature"):
        options |= {name: option(name) for name in SAMPLING if option(name) is not None} | {"do_sample": True}
    if option("timeout") is not None:
        options["max_time"] = option("timeout")
    return {**options, **option("model_kwargs")}
