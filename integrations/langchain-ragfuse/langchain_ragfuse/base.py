"""`RagFuseModel`, the base class of ragfuse's chat model and text model for LangChain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_serializer

from langchain_ragfuse.callbacks import retrieved_for
from ragfuse import Ask, Grammar, Settings
from ragfuse.adapters import Answerer, Place, ask_of

CONFIG = ConfigDict(
    arbitrary_types_allowed=True, extra="forbid", populate_by_name=True, protected_namespaces=()
)
CALL = frozenset(
    {"model", "stream", "model_kwargs", "tools", "strict", "ls_structured_output_format"}
)
"""Names of call arguments that are not generation options."""


class RagFuseModel(BaseModel):
    """A base class with the fields that `ChatRagFuse` and `RagFuseLLM` have in common.

    The weights are loaded at the first question. Models of one process with equal name, dtype and
    device share the weights. With `base_url`, a server answers, and no weights are loaded here.
    """

    model_config = CONFIG

    model: Any = Field(default=None, alias="model_name")
    """Name of an included model, Hugging Face id, folder of a model or adapter, or GGUF file. Or a
    loaded model: a `PreTrainedModel` together with `tokenizer`, a `pipeline`, or a PEFT model. None
    means the model in the settings.
    """
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """The tokenizer of a loaded model."""
    dtype: str | None = None
    device: str | None = None
    store: Path | None = None
    """Folder of the chunk store. None means the folder in the settings."""
    settings: Settings | None = Field(default=None, repr=False)
    """All other settings. None means to read the environment, ragfuse.toml and the defaults."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An existing engine to use instead of an engine made from the fields above. The field is None
    once the model is created; `get_engine` returns the engine.
    """
    base_url: str | None = None
    """URL of a `ragfuse serve` server to use instead of an engine in this process."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """The server's API key. None means the key in RAGFUSE_API_KEY. An engine needs no key."""
    max_retries: int | None = Field(default=None, ge=0)
    """Maximum retries if the server is unreachable or busy. None means 2."""

    policy: str | None = None
    """Policy that selects which tokens of cached chunks are recomputed. None means the setting."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of cached chunks' tokens to recompute, 0 (plain reuse) to 1. None means the setting."""
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
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    timeout: float | None = None
    """Maximum seconds of generation. An answer that takes longer ends unfinished."""
    deadline_s: float | None = Field(default=None, ge=0)
    """Seconds until the first token is wanted. To be in time, fewer tokens are recomputed, and KV
    from slow tiers is read at lossier codec levels.
    """
    grammar: Grammar | None = Field(default=None, repr=False)
    """A grammar that constrains every answer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template."""
    enable_thinking: bool | None = None
    """True if a reasoning model should think first. None means the chat template's default."""
    streaming: bool = False
    """True if `invoke` generates by streaming, so that callbacks receive single tokens."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options for loading the model (revision, trust_remote_code, attn_implementation, device_map,
    token, torch_dtype, quantization_config, ...). All other options are passed to transformers'
    `generate`.
    """

    _place: Place = PrivateAttr()

    @field_serializer("settings")
    def _public(self, settings: Settings | None) -> dict[str, Any] | None:
        """Return the settings as JSON types; SettingsError if a setting contains a secret."""
        return None if settings is None else settings.as_public()

    def model_post_init(self, context: Any, /) -> None:
        """Check the options, and find out which engine or server answers.

        The model is loaded on first use. A server is contacted on first use, too.

        Raises:
            SettingsError: An option is out of range.
            InputError: Fields contradict each other.
        """
        super().model_post_init(context)
        loading = {
            name: value for name, value in self.model_kwargs.items() if name in Settings.LOADING
        }
        self.model_kwargs = {
            name: value for name, value in self.model_kwargs.items() if name not in loading
        }
        self._ask(None, {})
        self._place = Place.of_fields(vars(self), model_kwargs=loading)
        self.engine = self.tokenizer = None
        if self.model is not None and not isinstance(self.model, str):
            self.model = str(self.model) if isinstance(self.model, Path) else None

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The environment variable that holds the secret field `api_key`."""
        return {"api_key": "RAGFUSE_API_KEY"}

    @property
    def model_name(self) -> str:
        """The model's name. The name of a server's model is known after the first question."""
        return self._place.name

    def get_engine(self, model: str | None = None) -> Answerer:
        """Return the passed engine or client, else an engine or client that this process shares.

        Args:
            model: Name of another model, as in a call with `model=`. None means this model.
        """
        return self._place.engine(model)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, from the model's tokenizer."""
        return self.get_engine().tokens(text)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        ask, usual = self._ask(None, {}), Ask()
        names = [
            each.name
            for each in fields(Ask)
            if getattr(ask, each.name) != getattr(usual, each.name)
        ]
        found = {name: getattr(ask, name) for name in names if name not in ("stop", "grammar")}
        grammar = {} if ask.grammar is None else {"grammar": repr(ask.grammar)}
        # LangChain would replace a key `stop` by the `stop` argument of the call.
        return {**self._place.identity, **found, **grammar, "stop_sequences": list(ask.stop)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        """Return the tracing parameters for LangSmith, with ragfuse's provider and model names."""
        return {
            **super()._get_ls_params(stop=stop, **kwargs),  # type: ignore[misc]
            "ls_provider": "ragfuse",
            "ls_model_name": kwargs.get("model") or self.model_name,
        }

    def _ask(
        self,
        stop: Sequence[str] | None,
        call: Mapping[str, Any],
        prompts: Sequence[Any] = (),
        run_manager: Any = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Ask:
        """Return the options of a call, with the documents that were retrieved for `prompts`."""
        given = {name: value for name, value in call.items() if name not in CALL}
        given |= {"stop": stop} if stop is not None else {}
        given |= {"generate_kwargs": {**self.model_kwargs, **(call.get("model_kwargs") or {})}}
        documents = (
            retrieved_for(run_manager, prompts) if prompts and self._place.hears_retrievers else ()
        )
        return ask_of(type(self).__name__, vars(self), given, tools, documents)

    def _metadata(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Return an answer's response metadata in LangChain's form. `told` is from `Place.told`."""
        kept = {"finish_reason": told["finish_reason"], "ragfuse": told["ragfuse"]}
        return {"model_name": told["model"], "model_provider": "ragfuse", **kept}


def usage_of(told: Mapping[str, Any]) -> UsageMetadata:
    """Return an answer's token numbers in LangChain's form.

    `cache_read` counts the tokens whose KV was found in the store. `cache_creation` counts the
    tokens of chunks encoded after the answer.
    """
    usage = told["usage"]
    details = usage["prompt_tokens_details"]
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=InputTokenDetails(
            cache_read=details["cached_tokens"], cache_creation=details["cache_creation_tokens"]
        ),
    )
