"""All settings and their defaults. Only this module reads RAGFUSE_* variables and ragfuse.toml.

Precedence, highest first: arguments, the environment, ragfuse.toml in the working directory, the
defaults below.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from platformdirs import user_cache_path
from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragfuse.errors import SettingsError
from ragfuse.process.folders import (
    can_be_written,
    make_own_folder,
    model_placed,
    placed_folder,
    temporary_folder,
    tier_placed,
)
from ragfuse.types.arguments import refused_arguments
from ragfuse.types.choices import (
    EVICTION_POLICIES,
    LEVEL_NAMES,
    LOADING,
    TIER_KINDS,
    LoadingOptions,
    as_setting,
)

log = logging.getLogger("ragfuse.settings")

PREFIX = "RAGFUSE_"
SINKS = 4
"""Number of tokens at a conversation's start that truncation keeps (attention sinks)."""
_CREDENTIALS = re.compile(
    r"//[^/?#]*@|[?&][^=&]*(?:user|pass|secret|token|key|sig)[^=&]*=", re.IGNORECASE
)
TIER_NAMES = ("gpu", "memory", *(kind.name for kind in TIER_KINDS))
"""Names of tiers; further tiers of the same kind are numbered (`redis-2`)."""


Folder = Annotated[Path, AfterValidator(placed_folder)]
TierURL = Annotated[str, AfterValidator(tier_placed)]
ModelName = Annotated[str, AfterValidator(model_placed)]


def _eviction(given: str) -> str:
    if given not in EVICTION_POLICIES:
        raise ValueError(f"wanted one of {', '.join(EVICTION_POLICIES)}")
    return given


def _tier(given: str) -> str:
    if re.sub(r"-[0-9]+$", "", given) not in TIER_NAMES:
        raise ValueError(f"wanted the name of a tier ({', '.join(TIER_NAMES)}, redis-2 ...)")
    return given


def _levels(given: tuple[str, ...]) -> tuple[str, ...]:
    if not given or not {*given} <= {*LEVEL_NAMES}:
        raise ValueError(f"wanted one or more of {', '.join(LEVEL_NAMES)}")
    return tuple(level for level in LEVEL_NAMES if level in given)


TierName = Annotated[str, AfterValidator(_tier)]
Levels = Annotated[tuple[str, ...], AfterValidator(_levels)]


class Settings(BaseSettings):
    """All settings, validated. Sizes are in bytes, times in seconds, and shares from 0 to 1."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,  # otherwise an empty RAGFUSE_STORE would mean the working directory
        toml_file="ragfuse.toml",
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,  # a tier's URL may contain a password
    )

    LOADING: ClassVar[tuple[str, ...]] = LOADING

    model: ModelName = Field(
        default="smollm2-135m-reader",
        description=(
            "The LLM: included model, Hugging Face id, local folder, adapter folder or GGUF file."
        ),
    )
    model_kwargs: Annotated[LoadingOptions, NoDecode, PlainValidator(LoadingOptions.read)] = Field(
        default=LoadingOptions(),
        repr=False,  # may contain an access token
        description=(
            "Options of transformers' from_pretrained for the LLM, as JSON: revision,"
            " trust_remote_code, attn_implementation, device_map, token, torch_dtype,"
            " quantization_config ... One more option, merge_adapter: false keeps a LoRA unmerged."
        ),
    )
    embedder: ModelName = Field(
        default="minilm-l6",
        description="The embedder: an included model, Hugging Face id or local folder.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description=(
            "Dtype of weights and KV. auto: bfloat16 if the device computes bfloat16 natively,"
            " otherwise float32."
        ),
    )
    device: str = Field(
        default="cpu", description="cpu, cuda, cuda:N, mps, or auto (the first GPU, else cpu)."
    )
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description=(
            "CPU threads of torch. auto: OMP_NUM_THREADS if set, else one thread for each free core"
            " that the process may use (CPU affinity and quota)."
        ),
    )

    home: Folder = Field(
        default_factory=lambda: user_cache_path("ragfuse"),
        description=(
            "Folder for all that ragfuse saves: store, indexes, prepared models, digests of models."
        ),
    )
    store: Folder | None = Field(
        default=None, description="Folder of the disk tier. Unset: RAGFUSE_HOME/store."
    )
    gpu_bytes: int = Field(
        default=2 << 30,
        ge=0,
        description="Capacity of the GPU tier, in GPU memory; used only with a GPU.",
    )
    memory_bytes: int = Field(default=2 << 30, ge=0, description="Capacity of the memory tier.")
    evict: Annotated[str, AfterValidator(_eviction)] = Field(
        default="look-ahead",
        description=(
            "Eviction policy of memory and disk. look-ahead: evict whole conversations, least"
            " recently used first; conversations that waiting requests continue are evicted last."
            " lru: evict entry by entry, least recently used first."
        ),
    )
    disk_bytes: int = Field(default=20 << 30, ge=0, description="Capacity of the disk tier.")
    tiers: Annotated[tuple[TierURL, ...], NoDecode] = Field(
        default=(),
        repr=False,  # a URL may contain a password
        description=(
            "Further tiers behind memory and disk: redis://, s3:// or file:// URLs, separated by"
            " commas, fastest tier first."
        ),
    )
    tier_bytes: int = Field(
        default=100 << 30, ge=1, description="Capacity of each folder in `tiers`."
    )
    placement: Literal["cheapest", "all"] = Field(
        default="cheapest",
        description=(
            "Tiers that a new chunk is written to, besides memory. cheapest: the cheapest tier"
            " (disk included) that is fast enough by `ragfuse measure`; without measurements, all"
            " tiers. all: all tiers; use this for tiers that several machines share."
        ),
    )
    levels: Annotated[tuple[tuple[TierName, Levels], ...], NoDecode] = Field(
        default=(),
        description=(
            'Codec levels at which each tier stores KV, by tier name: {"redis": ["int8", "cg2"]}.'
            " Levels: raw, int8, and cg1 (least lossy) to cg4. Tiers that are not named store raw"
            " KV."
        ),
    )
    tier_timeout_s: float = Field(
        default=2.0,
        gt=0,
        description="Seconds to wait for a reply of a tier in `tiers` before the call fails.",
    )
    ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds after which unused entries are deleted. Unset: never.",
    )
    salt: str = Field(
        default="",
        repr=False,
        description="Secret of a tenant: KV with one salt is never reused with another salt.",
    )
    writer_queue: int = Field(
        default=64,
        ge=1,
        description="Maximum number of chunks that wait to be saved; further chunks are not saved.",
    )

    share: bool = Field(
        default=True,
        description=(
            "Whether answers generated at the same time share the KV of common modules in memory."
        ),
    )
    prefix_cache: bool = Field(
        default=True,
        description=(
            "Whether the KV of the longest prefix known from earlier prompts is reused (exactly)."
        ),
    )
    learn: Literal["off", "retrieved", "text"] = Field(
        default="text",
        description=(
            "Which chunks are reused without being indexed. off: none. retrieved: documents from a"
            " framework's retriever. text: also long passages that occur in several prompts."
        ),
    )
    policy: Annotated[str, AfterValidator(as_setting)] = Field(
        default="auto",
        description=(
            "Policy that selects the tokens to recompute: hkvd, query, lexical, lego, none, full."
            " auto: the calibrated policy. Uncalibrated models use query, or lexical if they run"
            " their own attention code, or hkvd if RAGFUSE_FILLER_TOKENS is 0."
        ),
    )
    ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=(
            "Share of reused chunks' tokens to recompute. Unset: policy auto chooses the share,"
            " other policies use 0.15."
        ),
    )
    streams: int = Field(
        default=4, ge=1, description="Maximum prompts that read KV from one tier at the same time."
    )
    chunk_tokens: int = Field(
        default=160, ge=16, description="Maximum tokens of a chunk when ragfuse splits documents."
    )
    chunk_overlap: int = Field(default=0, ge=0, description="Tokens shared by neighbouring chunks.")
    filler_tokens: int = Field(
        default=256,
        ge=0,
        description=(
            "Tokens of filler text before a chunk while the chunk is encoded, so that the chunk is"
            " not encoded as the start of a text. 0: chunks are encoded alone."
        ),
    )
    min_chunk_tokens: int = Field(
        default=8,
        ge=1,
        description="Minimum tokens of a reused chunk; shorter chunks are always computed.",
    )
    top_k: int = Field(default=6, ge=1, description="Number of chunks retrieved for a question.")
    max_tokens: int = Field(default=256, ge=1, description="Maximum tokens of an answer.")
    history_buffer_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Maximum bytes of conversation KV in the queue for saving; more is not saved.",
    )
    window_tokens: int | None = Field(
        default=None,
        ge=2,
        description=(
            "Maximum tokens of a conversation's prompt and answer. Unset: the model's context."
        ),
    )
    truncate_ratio: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description=(
            "Share of window_tokens cut from the start of a conversation longer than window_tokens."
        ),
    )
    sinks: int = Field(
        default=SINKS,
        ge=0,
        description="First tokens of a conversation that truncation never cuts (attention sinks).",
    )
    session_ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds after which unused sessions are deleted. Unset: never.",
    )

    served_model_name: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description=(
            "Names under which a server offers its model, separated by commas. The first name"
            " appears in responses; the others are aliases. Empty: the last part of `model`."
        ),
    )
    api_keys: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        repr=False,
        description=(
            "Accepted API keys, separated by commas. Write SALT:KEY to share KV among keys with"
            " the same SALT (a secret); a plain KEY shares no KV. Empty: no key is needed."
        ),
    )
    api_key: str = Field(
        default="",
        repr=False,
        exclude=True,
        description="API key that --server and ChatRagFuse(base_url=...) send to a server.",
    )
    serve_together: int = Field(
        default=8, ge=1, description="Maximum requests that a server answers at the same time."
    )
    serve_waiting: int = Field(
        default=256,
        ge=1,
        description="Maximum requests in the queue; more requests get HTTP status 429.",
    )
    serve_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Seconds that a request may take, time in the queue included.",
    )
    serve_patience_s: float = Field(
        default=20.0, gt=0, description="Seconds that a client may take to send its request."
    )
    serve_grace_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that unfinished answers may still take when a server stops.",
    )
    serve_body_bytes: int = Field(
        default=12 << 20,
        ge=1024,
        description="Maximum bytes of a request body; 12 MiB holds a PDF of 8 MiB.",
    )
    serve_tenant_bytes: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Maximum bytes of a tenant's KV on disk; least recently used entries are evicted"
            " first. Unset: the tier's capacity, divided equally among the tenants."
        ),
    )
    serve_tenant_texts: int = Field(
        default=100_000,
        ge=1,
        description="Maximum chunk texts stored per tenant; the oldest texts are deleted first.",
    )
    serve_tenant_sessions: int = Field(
        default=10_000,
        ge=1,
        description="Maximum sessions of a tenant; least recently used sessions are deleted first.",
    )
    serve_schemas: int = Field(
        default=256, ge=0, description="Maximum schemas that each tenant of a server may register."
    )

    transfer_url: TierURL = Field(
        default="",
        repr=False,  # may contain a password
        description=(
            "Where a server puts the KV of prompts that another engine decodes: a folder (in"
            " /dev/shm for engines on one machine), or a redis:// or s3:// URL that both engines"
            " reach. Empty: no KV is handed over."
        ),
    )
    transfer_level: Literal["raw", "int8"] = Field(
        default="raw",
        description=(
            "Codec level of KV that is handed over. raw: exact. int8: lossy, half the size."
        ),
    )
    transfer_bytes: int = Field(
        default=8 << 30, ge=1, description="Maximum bytes of KV that wait for the other engine."
    )
    transfer_ttl_s: float = Field(
        default=300.0,
        ge=1,
        description="Seconds after which KV that no engine has fetched is deleted.",
    )

    @field_validator("api_keys", "served_model_name", "tiers", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        """Accept a list of strings, a list as JSON text, or comma-separated text."""
        if not isinstance(given, str):
            return given
        parts = json.loads(given) if given.lstrip().startswith("[") else given.split(",")
        return tuple(dict.fromkeys(part.strip() for part in map(str, parts) if part.strip()))

    @field_validator("levels", mode="before")
    @classmethod
    def _by_tier(cls, given: Any) -> Any:
        """Accept a mapping from tier to level or levels, also as JSON text."""
        given = json.loads(given or "{}") if isinstance(given, str) else given
        if not isinstance(given, Mapping):
            return given  # pairs, as `as_public` writes them
        return tuple((tier, (at,) if isinstance(at, str) else at) for tier, at in given.items())

    def as_public(self) -> dict[str, Any]:
        """Return all settings as JSON types. `Settings(**result)` restores the settings.

        Raises:
            SettingsError: A setting contains a secret (a salt, API keys, credentials in a URL, a
                token for loading the model), or an object without a JSON form.
        """
        secret = [name for name in ("salt", "api_keys") if getattr(self, name)]
        secret += ["tiers"] if any(map(_CREDENTIALS.search, self.tiers)) else []
        secret += ["transfer_url"] if _CREDENTIALS.search(self.transfer_url) else []
        secret += ["model_kwargs"] if isinstance(self.model_kwargs.get("token"), str) else []
        if secret:
            variables = ", ".join(PREFIX + name.upper() for name in secret)
            raise SettingsError(
                "These settings cannot be saved or sent to another process, because of the secret"
                f" in {' and '.join(secret)}. Set {variables} in the environment of the process"
                " that reads the settings, or pass settings=Settings(...) there."
            )
        try:
            json.dumps(dict(self.model_kwargs))
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"model_kwargs has a value that cannot be saved as JSON: {error}. Give dtypes and"
                " devices as strings, or save the loaded model and use its folder as model."
            ) from error
        return self.model_dump(mode="json")

    def placed(self) -> Settings:
        """Return the settings with all folders absolute, including folders set by `model_copy`."""
        return Settings(**{**self.model_dump(exclude_unset=True), "api_key": self.api_key})

    def usable(self) -> Settings:
        """Return the settings. An unwritable `home` is replaced by a temporary folder."""
        home = self.placed().home
        if can_be_written(home):
            return self
        return self.model_copy(
            update={"home": _instead_of(home), **({} if self.store else {"disk_bytes": 0})}
        )

    @property
    def written(self) -> dict[str, tuple[str, ...]]:
        """The codec levels of each tier that the setting `levels` names, least lossy first."""
        return dict(self.levels)

    @property
    def store_path(self) -> Path:
        """The folder of the disk tier."""
        return self.store if self.store is not None else self.home / "store"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read settings from arguments, then the environment, then ragfuse.toml."""
        fields = tuple(settings_cls.model_fields)
        for name in os.environ:
            if name.upper().startswith(PREFIX) and name[len(PREFIX) :].lower() not in fields:
                _tell_unknown(name, fields)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


@lru_cache
def _instead_of(home: Path) -> Path:
    """Return a temporary folder in place of an unwritable home, and warn once."""
    try:
        temporary = temporary_folder()
    except OSError as error:
        raise SettingsError(
            f"Cannot write to '{home}' or a temporary folder. Set RAGFUSE_HOME to a writable path.",
            "home",
        ) from error
    log.warning(
        "'%s' is not writable, so ragfuse saves nothing there and uses a temporary folder. Set"
        " RAGFUSE_HOME to a writable folder.",
        home,
    )
    for kind in ("models", "indexes"):
        make_own_folder(temporary / kind)
        for found in (home / kind).glob("[!.]*"):
            (temporary / kind / found.name).symlink_to(found)
    return temporary


@lru_cache
def _tell_unknown(name: str, fields: tuple[str, ...]) -> None:
    """Warn once about an unknown RAGFUSE_* variable, which may belong to another program."""
    near = get_close_matches(name[len(PREFIX) :].lower(), fields, 1)
    meant = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
    log.warning("The environment variable %s is ignored: there is no such setting%s", name, meant)


def _in_words(init: Callable[..., None]) -> Callable[..., None]:
    """Convert validation errors to a SettingsError that names the variable or file."""

    @wraps(init)
    def checked(self: Settings, **given: Any) -> None:
        try:
            init(self, **given)
        except ValidationError as error:
            raise refused_arguments(error, Settings, partial(_place, given)) from None
        except (ValueError, OSError) as error:
            raise SettingsError(
                f"The settings cannot be read from the {PREFIX}* variables or ragfuse.toml:"
                f" {error}. Correct the variable or the file."
            ) from error

    return checked


def _place(given: Mapping[str, Any], name: str) -> str:
    """Return the variable or file that set a setting; "" if an argument set it."""
    if name in given:
        return ""
    variable = f"{PREFIX}{name.upper()}"
    return (
        f"environment {variable}"
        if any(each.upper() == variable for each in os.environ)
        else "ragfuse.toml"
    )


Settings.__init__ = _in_words(Settings.__init__)  # type: ignore[method-assign]
