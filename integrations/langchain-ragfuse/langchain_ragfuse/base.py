"""What the chat model and the text model share: their fields, the engine behind them, and a call's wishes as an `Ask`.

Nothing here knows messages; how an answer becomes a message or a generation is told in the models' own files.
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
"""What a call may say: `llm.invoke(messages, ratio=1.0)` or `llm.bind(reuse=False)`."""


class RagFuseModel(BaseModel):
    """The fields of a model over ragfuse. The weights are loaded at the first question and shared by all models of the
    process with the same name, dtype and device."""

    model_config = CONFIG

    model: Any = Field(default=None, alias="model_name")
    """Embedded name, Hugging Face id, folder (of an adapter, too) or GGUF file; or what is loaded already: a
    `PreTrainedModel` beside `tokenizer`, a `pipeline`, a PEFT model. None: what the settings say."""
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """Of a loaded model."""
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
    overflow: Literal["error", "drop"] | None = None
    """A prompt longer than the model's window: refused with the numbers, or its last documents left out; None: what
    the settings say."""

    temperature: float | None = Field(default=None, ge=0)
    """None or 0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    """Tokens less likely than this share of the likeliest one are not drawn."""
    presence_penalty: float | None = None
    """What a token's logit loses if the answer has it already."""
    frequency_penalty: float | None = None
    """What it loses for each time that the answer has it."""
    repetition_penalty: float | None = None
    """What logits of tokens in prompt or answer are divided by (those below zero multiplied)."""
    logit_bias: dict[int, float] | None = None
    """By token id: what is added to its logit."""
    max_tokens: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    timeout: float | None = None
    """Seconds for writing an answer, after which it ends as it is."""
    deadline_s: float | None = Field(default=None, ge=0)
    """Seconds until the first token is wanted: what a store brings over a slow line comes smaller, or is computed."""
    grammar: Grammar | None = Field(default=None, repr=False)
    """What every answer must follow."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template."""
    enable_thinking: bool | None = None
    """Whether a model that can thinks before it answers, as its chat template has it; None: as that does by itself."""
    continue_final_message: bool = False
    """The last message is the beginning of the answer, which goes on with it."""
    streaming: bool = False
    """Whether `invoke` streams too, for callbacks that listen to tokens."""
    max_retries: int | None = None
    """Taken for compatibility: a local model has nothing to retry, and needs no key."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the model is loaded with: revision, trust_remote_code, attn_implementation, device_map, token, torch_dtype,
    quantization_config ... All others are options of transformers' `generate`."""

    _settings: Settings = PrivateAttr()
    _loaded: Any = PrivateAttr(default=None)

    @field_serializer("settings")
    def _public(self, settings: Settings | None) -> dict[str, Any] | None:
        """Settings as they may be written down; SettingsError where they hold a secret."""
        return None if settings is None else settings.as_public()

    def model_post_init(self, context: Any, /) -> None:
        """Read the settings now; whatever they name is made when it is needed."""
        super().model_post_init(context)
        loading = {name: value for name, value in self.model_kwargs.items() if name in Settings.LOADING}
        self.model_kwargs = {name: value for name, value in self.model_kwargs.items() if name not in Settings.LOADING}
        base = self.settings or (Settings() if self.engine is None else self.engine.settings)
        if self.model is not None and not isinstance(self.model, str):
            self._loaded = self.model if not isinstance(self.model, Path) else None
            self.model = str(self.model) if self._loaded is None else None
        named = {"model": self.model, "dtype": self.dtype, "device": self.device, "store": self.store}
        given = {name: value for name, value in named.items() if value is not None}
        if loading:
            given["model_kwargs"] = {**base.model_kwargs, **loading}
        self._settings = base if self.engine is not None else _with(base, given)
        if self._loaded is not None or self.tokenizer is not None or (self.engine is not None and loading):
            self._taken(loading)

    def _taken(self, loading: Mapping[str, Any]) -> None:
        """Check a loaded model now, and name it; InputError where something else is said that cannot be so."""
        if self.engine is not None:
            raise InputError("A ready engine has its model: leave out model=, tokenizer= and options of loading it.")
        for name in ("dtype", "device"):
            if self._loaded is not None and getattr(self, name) is not None:
                raise InputError(f"A loaded model has its {name}: leave {name}= out, or name the model.")
        engine = Engine.shared(self._settings, self._loaded, tokenizer=self.tokenizer)
        self._settings = engine.settings

    @property
    def model_name(self) -> str:
        """The model as it was named."""
        return self._settings.model

    def __getstate__(self) -> dict[str, Any]:
        """Its settings without engine and weights: a copy in another process loads its own.

        InputError for a model that was loaded already, which no other process can find.
        """
        if self._loaded is not None:
            raise InputError(
                f"{self.model_name} was handed over loaded, and no copy of it can be made for another process. Save it "
                "to a folder and name that: model='folder'."
            )
        bare = self.model_copy(update={"engine": None}) if self.engine is not None else self
        return super(RagFuseModel, bare).__getstate__()

    def get_engine(self, model: str | None = None) -> Engine:
        """The engine behind this model: the one given, or the process's own for these settings."""
        if model in (None, self.model_name):
            return self.engine or Engine.shared(self._settings, self._loaded, tokenizer=self.tokenizer)
        return Engine.shared(_with(self._settings, {"model": model}))

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text by the model's own tokenizer."""
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
            "stop_sequences": list(ask.stop),  # as `stop`, LangChain writes what a call says over it
            **({"deadline_s": ask.deadline_s} if ask.deadline_s is not None else {}),
            **({"grammar": repr(ask.grammar)} if ask.grammar is not None else {}),
            **({"chat_template_kwargs": dict(ask.chat_template_kwargs)} if ask.chat_template_kwargs else {}),
            **({"continue_final_message": True} if ask.continue_final_message else {}),
            **ask.options,
        }

    def _traced(self, params: Any, call: Mapping[str, Any]) -> Any:
        """LangSmith's parameters with provider and model as they are."""
        return {**params, "ls_provider": "ragfuse", "ls_model_name": call.get("model") or self.model_name}

    def _retrieved(self, run_manager: Any, asked: Sequence[Any]) -> tuple[tuple[str, str], ...]:
        """What was retrieved for messages or prompts, unless the settings say that nothing is to be learned."""
        return () if self._settings.learn == "off" else retrieved_for(run_manager, asked)

    def _ask(
        self,
        stop: Sequence[str] | None,
        call: Mapping[str, Any],
        further: Sequence[str] = (),
        documents: Sequence[tuple[str, str]] = (),
    ) -> Ask:
        """The fields of this model, where the call says nothing else; `further` names are the caller's business."""
        taken = (*PER_CALL, *further)
        unknown = sorted(set(call) - set(taken))
        if unknown:
            raise InputError(
                f"{type(self).__name__} takes no argument '{unknown[0]}' in a call; wanted {', '.join(taken)} or stop. "
                "Options of transformers' `generate` go into model_kwargs={...}."
            )
        said: Callable[[str], Any] = lambda name: call[name] if name in call else getattr(self, name)  # noqa: E731
        return Ask(
            max_tokens=said("max_tokens"),
            policy=said("policy"),
            ratio=said("ratio"),
            reuse=said("reuse"),
            stop=(self.stop or ()) if stop is None else stop,
            seed=said("seed"),
            overflow=said("overflow"),
            deadline_s=said("deadline_s"),
            grammar=_grammar(call.get("response_format")) or said("grammar"),
            options=_options(said),
            documents=documents,
            chat_template_kwargs=Ask.template_kwargs(vars(self), call),
            continue_final_message=bool(said("continue_final_message")),
        )


def metadata_of(answer: Answer, engine: Engine) -> dict[str, Any]:
    """What LangChain calls response metadata; `ragfuse` is the trace."""
    return {
        "model_name": engine.settings.model,
        "model_provider": "ragfuse",
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.finish_reason,
        "ragfuse": answer.trace.as_dict(),
    }


def usage_of(answer: Answer, engine: Engine, ask: Ask) -> UsageMetadata:
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


@asynccontextmanager
async def cancelled_at_exit(stream: AnswerStream) -> AsyncIterator[AnswerStream]:
    """The stream, whose generation ends when its reader goes, however that goes."""
    try:
        yield stream
    finally:
        stream.cancel()


def _grammar(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """What OpenAI's `response_format` asks an answer to follow."""
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
    """The same settings, some of them otherwise."""
    return Settings(**{**settings.model_dump(), **given}) if given else settings


def _options(said: Callable[[str], Any]) -> dict[str, Any]:
    """Options of transformers' `generate` besides those that Ask names."""
    options: dict[str, Any] = {name: said(name) for name in PENALTIES if said(name) is not None}
    if said("temperature"):
        options |= {name: said(name) for name in SAMPLING if said(name) is not None} | {"do_sample": True}
    if said("timeout") is not None:
        options["max_time"] = said("timeout")
    return {**options, **said("model_kwargs")}
