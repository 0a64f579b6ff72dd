"""Every default of the house, once, and the only reader of RAGFUSE_* and ragfuse.toml.

What is given in code wins over the environment, the environment over ragfuse.toml in the working directory, and that
over the defaults below.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragfuse.errors import SettingsError
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.tiers import TIER_KINDS

log = logging.getLogger("ragfuse.settings")

PREFIX = "RAGFUSE_"
SharedWith = Literal["nobody", "group"]
AUTO_LEVEL = "auto"
"""A tier's level is chosen by how fast this machine was measured to be."""
SINKS = 4
"""First tokens of a conversation without which what was computed behind them says less (StreamingLLM, 3.1)."""
_CREDENTIALS = re.compile(r"//[^/?#]*@|[?&][^=&]*(?:user|pass|secret|token|key|sig)[^=&]*=", re.IGNORECASE)
LOADING = (
    "revision",
    "trust_remote_code",
    "attn_implementation",
    "device_map",
    "token",
    "torch_dtype",
    "dtype",
    "quantization_config",
    "max_memory",
    "offload_folder",
    "offload_buffers",
    "experts_implementation",
    "subfolder",
    "cache_dir",
    "local_files_only",
    "variant",
    "gguf_file",
    "merge_adapter",
)
"""Options that a model is loaded with: those of transformers' `from_pretrained`, and whether an adapter is merged."""
TIER_NAMES = ("gpu", "memory", *(kind.name for kind in TIER_KINDS))
"""What tiers are called; those that URLs open may have a number behind."""


class Prices(BaseModel):
    """What a gigabyte costs a month, by kind of tier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: float = Field(default=3.0, ge=0)
    disk: float = Field(default=0.08, ge=0)
    redis: float = Field(default=5.0, ge=0)
    objects: float = Field(default=0.023, ge=0)


class LoadingOptions(dict[str, Any]):
    """What a model is loaded with, by name; not to be changed. Hashable, so that settings can be."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))


class Settings(BaseSettings):
    """All settings, typed and checked. Sizes in bytes, times in seconds, shares 0..1."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        toml_file="ragfuse.toml",
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,  # a tier's URL may hold a password
    )

    LOADING: ClassVar[tuple[str, ...]] = LOADING

    model: str = Field(
        default="smollm2-135m-reader",
        description="Embedded name, Hugging Face id, local folder, folder of an adapter or GGUF file of the LLM.",
    )
    model_kwargs: Annotated[LoadingOptions, NoDecode, PlainValidator(lambda given: _loading(given))] = Field(
        default=LoadingOptions(),
        repr=False,  # may hold a token
        description="Options of transformers' from_pretrained for the LLM, by name: revision, trust_remote_code, "
        "attn_implementation, device_map, token, torch_dtype, quantization_config ...; merge_adapter for adapters.",
    )
    embedder: str = Field(
        default="minilm-l6", description="Embedded name, Hugging Face id or local folder of the embedder."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Weights and KV; auto: bfloat16 where the device has units for it, else float32."
    )
    device: str = Field(default="cpu", description="cpu, cuda, cuda:N, mps, or auto: the first GPU, else cpu.")

    home: Path = Field(
        default_factory=lambda: user_cache_path("ragfuse"), description="Prepared models, stores, profiles."
    )
    store: Path | None = Field(default=None, description="Folder of the disk tier; default home/store.")
    shared_with: SharedWith = Field(
        default="nobody",
        description="Who else on this machine may use the folders of store and file:// tiers: nobody (0700, 0600), or "
        "their group (02770, 0660). Those above them are as they are.",
    )
    gpu_bytes: int = Field(default=2 << 30, ge=0, description="Capacity of the tier in the GPU's memory, on a GPU.")
    memory_bytes: int = Field(default=2 << 30, ge=0, description="Capacity of the memory tier.")
    memory_free: float = Field(
        default=0.0,
        ge=0,
        le=0.9,
        description="Share of the memory tier that a write leaves free, so that what is fetched next finds room.",
    )
    evict: str = Field(
        default="look-ahead",
        description="The policy by which memory and the disk drop entries for new ones. look-ahead: whole "
        "conversations, those that no waiting request continues first, then what was used longest ago. lru: entry "
        "by entry, what was used longest ago first.",
    )
    disk_bytes: int = Field(default=20 << 30, ge=0, description="Capacity of the disk tier.")
    tiers: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        repr=False,  # a URL may hold a password
        description="Slower tiers behind memory and disk, fastest first: redis://, s3://, file:// ... URLs.",
    )
    tier_bytes: int = Field(default=100 << 30, ge=1, description="Capacity of each of these.")
    placement: Literal["cheapest", "all"] = Field(
        default="cheapest",
        description="Slow tiers, the disk too, that a new chunk goes to on a measured machine: the cheapest that is "
        "fast enough, or all of them, as where tiers are shared. Unmeasured: all.",
    )
    levels: Annotated[tuple[tuple[str, tuple[str, ...]], ...], NoDecode] = Field(
        default=(),
        description='Codec levels that a tier is written in, by its name, {"redis": ["int8", "cg2"]}: raw, int8, cg1 '
        "(loses least) to cg4, or several; auto chooses on a measured machine. Tiers without an own are raw.",
    )
    tier_timeout_s: float = Field(default=2.0, gt=0, description="How long one of them may take to say anything.")
    ttl_s: float | None = Field(default=None, gt=0, description="Entries unused for so long are dropped; none: never.")
    prices: Prices = Field(default=Prices(), description="What keeping a gigabyte costs; only the order matters.")
    salt: str = Field(default="", repr=False, description="Tenant: one salt never hits another's entries.")
    writer_queue: int = Field(default=64, ge=1, description="Chunks waiting to be saved before saving is skipped.")

    share: bool = Field(
        default=True,
        description="Whether answers that are written at the same time hold modules that they have in common once, "
        "in memory.",
    )
    prefix_cache: bool = Field(
        default=True,
        description="Whether the longest beginning that a prompt shares with an earlier one is taken from memory. It "
        "is exact.",
    )
    learn: Literal["off", "heard", "text"] = Field(
        default="text",
        description="Which chunks are found without being indexed: none (off); what a framework's retrievers returned "
        "(heard); also long passages that several prompts hold (text).",
    )
    policy: str = Field(
        default="auto", description="Selection policy, see ragfuse.fuse.select; auto: by what the store holds."
    )
    ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of reused context rows computed again; default: 0.15, or what auto chooses.",
    )
    adapt: Literal["refine", "paper", "algorithm", "raw", "int8", "cg1", "cg2", "cg3", "cg4"] = Field(
        default="refine",
        description="How pieces come over a line under a deadline: something of all first, and better levels while "
        "there is time; by section 5.3 of CacheGen; by its algorithm 1; or always at one level, whatever the deadline.",
    )
    piece_tokens: int = Field(default=1500, ge=16, description="Tokens of such a piece, about.")
    streams: int = Field(default=4, ge=1, description="Questions that read over one line at the same time, at most.")
    chunk_tokens: int = Field(default=160, ge=16, description="Size of a chunk when documents are cut here.")
    chunk_overlap: int = Field(default=0, ge=0, description="Tokens shared by neighbouring chunks.")
    filler_tokens: int = Field(
        default=256,
        ge=0,
        description="Tokens of other text that a chunk is encoded behind, so that it does not stand for a beginning; "
        "0: chunks are encoded alone.",
    )
    min_chunk_tokens: int = Field(default=8, ge=1, description="Shorter runs are always computed fresh.")
    top_k: int = Field(default=6, ge=1, description="Chunks retrieved for a question.")
    max_tokens: int = Field(default=256, ge=1, description="New tokens of an answer.")
    overflow: Literal["error", "drop"] = Field(
        default="error",
        description="For a prompt that is too long: error, or drop its last chunks until it fits with its answer.",
    )
    history: Literal["auto", "asked", "all"] = Field(
        default="auto",
        description="Whose turns' KV is kept for the next turn: asked, of questions that name a session; auto, also of "
        "other messages without retrieved chunks, in memory alone; all, of all messages, written down like sessions.",
    )
    history_chunks: bool = Field(
        default=True,
        description="Whether a session's later prompts hold the chunks that were retrieved for its earlier turns.",
    )
    history_buffer_bytes: int = Field(
        default=1 << 30, ge=0, description="KV of answers that may wait to be saved; a turn beyond it is not saved."
    )
    window_tokens: int | None = Field(
        default=None, ge=2, description="Tokens of a conversation's prompt and answer; default: what the model takes."
    )
    truncate_ratio: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the window that a conversation is shortened by, from its beginning, once it is too long.",
    )
    sinks: int = Field(
        default=SINKS,
        ge=0,
        description="First tokens of a conversation that stay then; later ones attend to them for want of others.",
    )
    session_ttl_s: float | None = Field(
        default=None, gt=0, description="Sessions unused for so long are deleted; none: never."
    )

    api_keys: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        repr=False,
        description="Who may ask a server: KEY, or SALT:KEY for the tenant of that salt, several parted by commas.",
    )
    serve_together: int = Field(default=8, ge=1, description="Requests that a server answers at the same time.")
    serve_waiting: int = Field(default=256, ge=1, description="Requests that wait for their turn; more are refused.")
    serve_timeout_s: float = Field(default=300.0, gt=0, description="How long a request may take, waiting included.")
    serve_patience_s: float = Field(default=20.0, gt=0, description="How long sending a request may take.")
    serve_grace_s: float = Field(default=30.0, ge=0, description="How long answers go on once a server is to stop.")
    serve_body_bytes: int | None = Field(
        default=None, ge=1024, description="The largest request; default: what the model's window can take, as JSON."
    )
    serve_connections_each: int = Field(
        default=512,
        ge=1,
        description="Connections of one address; for one more, the oldest that asks nothing is closed.",
    )
    serve_held_bytes: int = Field(
        default=256 << 20,
        ge=1024,
        description="Of all requests that are read, wait or are answered; with several tenants half of it each.",
    )
    serve_tenant_bytes: int | None = Field(
        default=None,
        ge=1,
        description="KV of a tenant in each tier that outlives a server; what was used longest ago goes first. "
        "Default: each tier's capacity, parted among the tenants.",
    )
    serve_tenant_texts: int = Field(
        default=100_000, ge=1, description="Known texts of a tenant; beyond it the oldest are forgotten."
    )
    serve_tenant_sessions: int = Field(
        default=10_000, ge=1, description="Sessions of a tenant; beyond it those used longest ago are deleted."
    )
    serve_schemas: int = Field(default=256, ge=0, description="Schemas that a tenant of a server may register.")

    @field_validator("api_keys", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        """Texts, or one text with commas."""
        parts = given.split(",") if isinstance(given, str) else given
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise ValueError("wanted texts, found something else; write them so: RAGFUSE_API_KEYS=KEY,SALT:KEY")
        return tuple(part.strip() for part in parts if part.strip())

    @field_validator("tiers", mode="before")
    @classmethod
    def _urls(cls, given: Any) -> Any:
        """A list in JSON, one URL alone, or nothing."""
        if isinstance(given, str):
            text = given.strip()
            try:
                given = json.loads(text) if text.startswith(("[", "{")) else [text] if text else []
            except ValueError:
                given = None
        if not isinstance(given, list | tuple):
            raise ValueError(
                "wanted URLs, found something else; write them so: RAGFUSE_TIERS='[\"redis://cache:6379/0\"]'"
            )
        return given

    @field_validator("levels", mode="before")
    @classmethod
    def _by_tier(cls, given: Any) -> Any:
        """Levels by tier, from a mapping or its JSON; a level alone stands for a list of one."""
        try:
            given = json.loads(given or "{}") if isinstance(given, str) else given
            pairs = given.items() if isinstance(given, Mapping) else tuple(given)
            listed = ((tier, (told,) if isinstance(told, str) else tuple(told)) for tier, told in pairs)
            return tuple((_tier_named(tier), _levels_named(levels)) for tier, levels in listed)
        except (TypeError, KeyError, ValueError) as error:
            told = str(error) if isinstance(error, _Told) else "found something else than lists of levels by tier"
            raise ValueError(f'{told}; write it so: RAGFUSE_LEVELS=\'{{"redis": ["int8", "cg2"]}}\'') from None

    @field_validator("home", "store", mode="after")
    @classmethod
    def _absolute(cls, given: Path | None) -> Path | None:
        """A folder as it is meant now, wherever the process works later."""
        return given if given is None else _placed(given)

    @field_validator("tiers", mode="after")
    @classmethod
    def _absolute_tiers(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_tier_placed, given))

    @field_validator("model", "embedder", mode="after")
    @classmethod
    def _absolute_model(cls, given: str) -> str:
        return _model_placed(given)

    def as_public(self) -> dict[str, Any]:
        """All settings in plain JSON types, to be written down: `Settings(**them)` gives the same.

        SettingsError where one is a secret (a salt, keys of a server, credentials in a tier's URL, a token to load the
        model with) or an object that has no JSON.
        """
        secret = [name for name in ("salt", "api_keys") if getattr(self, name)]
        secret += ["tiers"] if any(map(_CREDENTIALS.search, self.tiers)) else []
        secret += ["model_kwargs"] if isinstance(self.model_kwargs.get("token"), str) else []
        if secret:
            variables = ", ".join(PREFIX + name.upper() for name in secret)
            raise SettingsError(
                f"Wanted settings that may be written down, found a secret in {' and '.join(secret)}. Leave it to the "
                f"environment ({variables}) of the process that reads them, or give that one its settings by itself: "
                "settings=Settings(...)."
            )
        try:
            json.dumps(dict(self.model_kwargs))
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"Wanted options of loading that may be written down, found in model_kwargs what JSON has no form for: "
                f"{error}. Name dtypes and devices by text, or save the model to a folder as it was loaded."
            ) from error
        return self.model_dump(mode="json")

    def placed(self) -> Settings:
        """The same with every folder as it is meant now: a copy may have been given others, which nobody looked at."""
        named = {
            "home": _placed(self.home),
            "store": None if self.store is None else _placed(self.store),
            "tiers": tuple(map(_tier_placed, self.tiers)),
            "model": _model_placed(self.model),
            "embedder": _model_placed(self.embedder),
        }
        changed = {name: value for name, value in named.items() if value != getattr(self, name)}
        return self.model_copy(update=changed) if changed else self

    @property
    def written(self) -> dict[str, tuple[str, ...]]:
        """Levels by tier, what loses least first; of tiers whose level is chosen, `AUTO_LEVEL`."""
        return dict(self.levels)

    @property
    def store_path(self) -> Path:
        """The disk tier's folder."""
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
        """Arguments, environment, ragfuse.toml."""
        fields = tuple(settings_cls.model_fields)
        for name in os.environ:
            if name.upper().startswith(PREFIX) and name[len(PREFIX) :].lower() not in fields:
                _tell_unknown(name, fields)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def _placed(folder: str | Path) -> Path:
    """A folder from the root on: relative to where the process works now, `~` the user's own."""
    return Path(os.path.abspath(os.path.expanduser(folder)))


def _tier_placed(url: str) -> str:
    """A tier with its folder from the root on, where it is one of this machine's."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return str(_placed(url)) if url.strip() else url
    return f"{scheme}://{_placed(rest)}" if scheme.lower() in ("file", "local") and rest else url


def _model_placed(name: str) -> str:
    """A model's folder from the root on, where the name is that of one; another name as it is."""
    try:
        is_folder = bool(name.strip()) and os.path.isdir(os.path.expanduser(name))
    except ValueError:  # no path at all
        is_folder = False
    return str(_placed(name)) if is_folder else name


class _Told(ValueError):
    """What is wrong with a setting, for people."""


def _loading(given: Any) -> LoadingOptions:
    """Loading options from a mapping or its JSON; of the names in `LOADING` alone."""
    told = given
    if isinstance(given, str):
        try:
            told = json.loads(given or "{}")
        except ValueError:
            told = None
    if not isinstance(told, Mapping):
        raise ValueError(
            'wanted options by name, found something else; write them so: RAGFUSE_MODEL_KWARGS=\'{"revision": "main"}\''
        )
    strange = next((str(name) for name in told if name not in LOADING), None)
    if strange is not None:
        near = get_close_matches(strange, LOADING, 1)
        meant = f"; did you mean {near[0]}?" if near else f"; it is one of: {', '.join(LOADING)}"
        raise ValueError(f"'{strange}' is no option that a model is loaded with{meant}")
    return LoadingOptions({str(name): value for name, value in told.items()})


def _tier_named(name: object) -> str:
    if not isinstance(name, str) or re.sub(r"-[0-9]+$", "", name) not in TIER_NAMES:
        raise _Told(f"wanted a tier ({', '.join(TIER_NAMES)}, redis-2 ...), found {name!r:.60}")
    return name


def _levels_named(levels: tuple[object, ...]) -> tuple[str, ...]:
    if levels == (AUTO_LEVEL,):
        return (AUTO_LEVEL,)
    strange = [level for level in levels if level not in LEVEL_NAMES]
    if strange or not levels:
        found = repr(strange[0])[:60] if strange else "none"
        raise _Told(f"wanted levels of {', '.join(LEVEL_NAMES)}, or {AUTO_LEVEL} alone, found {found}")
    return tuple(level for level in LEVEL_NAMES if level in levels)


@lru_cache
def _tell_unknown(name: str, fields: tuple[str, ...]) -> None:
    """Say once that a variable is no setting's; it may be another program's, so it is no error."""
    near = get_close_matches(name[len(PREFIX) :].lower(), fields, 1)
    meant = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
    log.warning("%s is ignored, there is no such setting%s", name, meant)
