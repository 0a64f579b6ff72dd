"""The base of the chat model and the text model: their fields, their engine, and the options of a call as an `Ask`.

`chat_models.py` and `llms.py` turn answers into LangChain's messages and generations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_serializer

from langchain_ragfuse.callbacks import retrieved_for
from langchain_ragfuse.places import ProcessPlace, ServerPlace
from ragfuse import Answer, AnswerStream, Ask, Grammar, InputError, Settings
from ragfuse.remote import Answerer, RemoteEngine, is_answerer

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


def _checked_engine(engine: Any) -> Any:
    if engine is not None and not is_answerer(engine):
        raise ValueError(f"wanted a ragfuse.Engine or a ragfuse.RemoteEngine, found a {type(engine).__name__}")
    return engine


class RagFuseModel(BaseModel):
    """The fields that `ChatRagFuse` and `RagFuseLLM` share.

    The weights are loaded at the first question and shared by all models of the process with the same name, dtype and
    device. With `base_url` a server answers, and nothing is loaded here.
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
    engine: Annotated[Any, AfterValidator(_checked_engine)] = Field(default=None, exclude=True, repr=False)
    """An existing engine, used instead of one made from the fields above."""
    base_url: str | None = None
    """Address of a `ragfuse serve` that answers instead of an engine in this process."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """The server's API key; None: RAGFUSE_API_KEY. An engine in this process needs none."""
    max_retries: int | None = Field(default=None, ge=0)
    """How often a request is sent again that found no server or a busy one; None: twice."""

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
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options for loading the model (revision, trust_remote_code, attn_implementation, device_map, token, torch_dtype,
    quantization_config, ...); all others are passed to transformers' `generate`."""

    _place: ProcessPlace | ServerPlace = PrivateAttr()

    @field_serializer("settings")
    def _public(self, settings: Settings | None) -> dict[str, Any] | None:
        """Serialise the settings; raises SettingsError if they contain a secret."""
        return None if settings is None else settings.as_public()

    def model_post_init(self, context: Any, /) -> None:
        """Check the options of answers, and resolve where the model is.

        It is loaded, or its server asked, at first use.

        Raises:
            SettingsError: An option is out of its range.
        """
        super().model_post_init(context)
        Ask.check_fields({name: getattr(self, name) for name in type(self).model_fields})
        if self.base_url is not None or isinstance(self.engine, RemoteEngine):
            self._place = ServerPlace.of(self)
            return
        loading = {name: value for name, value in self.model_kwargs.items() if name in Settings.LOADING}
        self.model_kwargs = {name: value for name, value in self.model_kwargs.items() if name not in Settings.LOADING}
        self._place = ProcessPlace.of(self, loading)
        if self.model is not None and not isinstance(self.model, str):
            self.model = str(self.model) if isinstance(self.model, Path) else None

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The environment variable of the API key."""
        return {"api_key": "RAGFUSE_API_KEY"}

    @property
    def model_name(self) -> str:
        """The model's name in the settings; that of a server's is known after the first question."""
        return self._place.name

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
        bare = self.model_copy(update={"engine": None}) if self.engine is not None else self
        return super(RagFuseModel, bare).__getstate__()

    def get_engine(self, model: str | None = None) -> Answerer:
        """Return what answers: the field `engine`, else an engine that the process shares, or a server's client.

        Args:
            model: Name of another model, for a call with `model=`; None: this one.
        """
        return self._place.engine(self.engine, model)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text by the model's tokenizer."""
        return self.get_engine().tokens(text)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        ask = self._ask(None, {})
        return {
            **self._place.params(ask),
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
        return retrieved_for(run_manager, prompts) if self._place.hears_retrievers else ()

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


def metadata_of(answer: Answer, engine: Answerer) -> dict[str, Any]:
    """Return LangChain's response metadata of an answer; its key `ragfuse` holds the trace."""
    return {
        "model_name": engine.card.name,
        "model_provider": "ragfuse",
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.finish_reason,
        "ragfuse": answer.trace.as_dict(),
    }


def usage_of(answer: Answer, engine: Answerer, ask: Ask) -> UsageMetadata:
    """Return the token counts; cache_read: reused from the store, cache_creation: misses that are encoded for later."""
    trace = answer.trace
    saves = ask.reuse and not engine.card.refusal
    return UsageMetadata(
        input_tokens=trace.tokens,
        output_tokens=len(answer.token_ids),
        total_tokens=trace.tokens + len(answer.token_ids),
        input_token_details=InputTokenDetails(
            cache_read=trace.tokens_found, cache_creation=trace.tokens_to_encode if saves else 0
        ),
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


def _options(option: Callable[[str], Any]) -> dict[str, Any]:
    """Return the options of transformers' `generate` that are not fields of `Ask`."""
    options = Ask.generate_options({name: option(name) for name in (*SAMPLING, *PENALTIES)})
    if option("timeout") is not None:
        options["max_time"] = option("timeout")
    return {**options, **option("model_kwargs")}
