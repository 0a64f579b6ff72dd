"""The base class of the chat model and the text model: their fields, and the options of a call."""

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
"""Arguments of a call that are not generation options."""


class RagFuseModel(BaseModel):
    """The fields that `ChatRagFuse` and `RagFuseLLM` share.

    The weights are loaded at the first question and shared by all models of the process with the
    same name, dtype and device. With `base_url`, a server is used and nothing is loaded here.
    """

    model_config = CONFIG

    model: Any = Field(default=None, alias="model_name")
    """Name of an embedded model, Hugging Face id, folder of a model or adapter, or GGUF file; or a
    loaded model: a `PreTrainedModel` together with `tokenizer`, a `pipeline`, a PEFT model. None:
    the model in the settings.
    """
    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """The tokenizer of a loaded model."""
    dtype: str | None = None
    device: str | None = None
    store: Path | None = None
    """Folder of the chunk store; None: the folder in the settings."""
    settings: Settings | None = Field(default=None, repr=False)
    """All other settings; None: from the environment, ragfuse.toml and the defaults."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An existing engine, used instead of one made from the fields above; `get_engine` returns it.
    """
    base_url: str | None = None
    """Address of a `ragfuse serve` to use instead of an engine in this process."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """The server's API key; None: RAGFUSE_API_KEY. An engine in this process needs none."""
    max_retries: int | None = Field(default=None, ge=0)
    """Maximum retries if the server is unreachable or busy; None: 2."""

    policy: str | None = None
    """Selects the tokens of cached chunks to recompute; None: the policy in the settings."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of tokens to recompute, 0 (plain reuse) to 1 (full prefill); None: the ratio in the
    settings.
    """
    reuse: bool = True
    """False: full prefill, for comparison."""

    temperature: float | None = Field(default=None, ge=0)
    """None or 0: greedy decoding."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    """Tokens with less than this share of the most likely token's probability are not sampled."""
    presence_penalty: float | None = None
    """Subtracted from the logit of each token that is already in the answer."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit once per occurrence in the answer."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in the prompt or answer."""
    logit_bias: dict[int, float] | None = None
    """Numbers to add to tokens' logits, by token id."""
    max_tokens: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    timeout: float | None = None
    """Maximum seconds of generation; then the answer ends unfinished."""
    deadline_s: float | None = Field(default=None, ge=0)
    """Seconds until the first token is wanted. To meet this, KV in a slow tier is loaded at a
    smaller codec level, or recomputed.
    """
    grammar: Grammar | None = Field(default=None, repr=False)
    """A grammar that constrains every answer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template."""
    enable_thinking: bool | None = None
    """True if a reasoning model should think before it answers; None: its template's default."""
    streaming: bool = False
    """True if `invoke` also streams, for callbacks on single tokens."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options for loading the model (revision, trust_remote_code, attn_implementation, device_map,
    token, torch_dtype, quantization_config, ...); all others go to transformers' `generate`.
    """

    _place: Place = PrivateAttr()

    @field_serializer("settings")
    def _public(self, settings: Settings | None) -> dict[str, Any] | None:
        """Serialise the settings; SettingsError if they contain a secret."""
        return None if settings is None else settings.as_public()

    def model_post_init(self, context: Any, /) -> None:
        """Check the options, and resolve the engine or server.

        The model is loaded, or the server contacted, on first use.

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
        """The environment variable of the API key."""
        return {"api_key": "RAGFUSE_API_KEY"}

    @property
    def model_name(self) -> str:
        """The model's name; that of a server's model is known after the first question."""
        return self._place.name

    def get_engine(self, model: str | None = None) -> Answerer:
        """Return the given engine, the engine shared by this process, or a server's client.

        Args:
            model: Name of another model, for a call with `model=`; None: this one.
        """
        return self._place.engine(model)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text by the model's tokenizer."""
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
        # LangChain would replace the key `stop` by the call's argument.
        return {**self._place.identity, **found, **grammar, "stop_sequences": list(ask.stop)}

    def _traced(self, params: Any, call: Mapping[str, Any]) -> Any:
        """Return LangSmith's parameters with the actual provider and model."""
        return {
            **params,
            "ls_provider": "ragfuse",
            "ls_model_name": call.get("model") or self.model_name,
        }

    def _ask(
        self,
        stop: Sequence[str] | None,
        call: Mapping[str, Any],
        prompts: Sequence[Any] = (),
        run_manager: Any = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Ask:
        """Return the options of a call, with the documents retrieved for its messages or texts."""
        given = {name: value for name, value in call.items() if name not in CALL}
        given |= {"stop": stop} if stop is not None else {}
        given |= {"generate_kwargs": {**self.model_kwargs, **(call.get("model_kwargs") or {})}}
        documents = (
            retrieved_for(run_manager, prompts) if prompts and self._place.hears_retrievers else ()
        )
        return ask_of(type(self).__name__, vars(self), given, tools, documents)

    def _metadata(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Return LangChain's response metadata from `Place.told`, with the trace in `ragfuse`."""
        kept = {"finish_reason": told["finish_reason"], "ragfuse": told["ragfuse"]}
        return {"model_name": told["model"], "model_provider": "ragfuse", **kept}


def usage_of(told: Mapping[str, Any]) -> UsageMetadata:
    """Return the token counts. `cache_read` counts tokens found in the store; `cache_creation`
    counts tokens of missed chunks, which are encoded after the answer.
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
