"""What all parts of an engine share: its store and queues, and its model, loaded once, at first
use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ragfuse.engine.codec_tables import ensure_tables
from ragfuse.engine.encoder import Encoder
from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.model_profiles import ProfileStore
from ragfuse.engine.store_opener import open_catalog, opened
from ragfuse.errors import ModelError, SettingsError
from ragfuse.hf.fingerprint import weights_digest
from ragfuse.hf.model import HFModel
from ragfuse.hf.probe import device_of
from ragfuse.hf.shared_kv import SharedKV
from ragfuse.hf.verify import Verdict, verify
from ragfuse.load.link import Links
from ragfuse.models import quietly, resolve_llm
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.loader import Given, LoadedModel, Tokens, load_model
from ragfuse.models.threads import limit_threads
from ragfuse.models.weight_files import identity
from ragfuse.plan.controller import settle
from ragfuse.process.exit import at_work
from ragfuse.process.jobs import BackgroundJobs
from ragfuse.process.shared import shared, shared_while_used
from ragfuse.sessions.conversation_index import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.codec_registry import CodecRegistry
from ragfuse.store.tenants import remember_tenant
from ragfuse.types.keys import digest
from ragfuse.types.profiles import ModelProfile

log = logging.getLogger("ragfuse")

MAX_WAITING_JOBS = 256
"""Most jobs that may wait; further ones are dropped, and submitted again by the next question that
needs them.
"""


def ignore(*what: object) -> None:
    """Ignore progress."""


class Runtime:
    """A model with its tenant, profile and encoder, over the store that its KV is kept in.
    Thread-safe.

    Nothing is loaded before `model` is first used.

    Args:
        settings: All settings.
        given: A loaded model; None: the model in the settings.
        store: An open store; None: the one in the settings.
        conversations: Which KV belongs to which conversation; it evicts.

    Attributes:
        catalog: Where profiles, timings, sessions, schemas and the texts of known chunks are
            stored.
        store: Where encoded KV is stored.
        timings: Timings of this machine.
        links: The links to remote tiers, with their throughput.
        saves: KV of prompts that waits in memory until it is saved.
        shared_kv: KV that several answers in memory share.
        jobs: What is done after answers: chunks to encode, passages to learn.
    """

    def __init__(
        self,
        settings: Settings,
        given: LoadedModel | HFModel | None,
        store: KVStore | None,
        conversations: ConversationIndex,
    ) -> None:
        self.settings, self.conversations, self._given = settings, conversations, given
        self.catalog = open_catalog(settings, store)
        self._codecs = CodecRegistry(self.catalog)
        self.store = opened(settings, store, self._codecs, conversations.evict(settings))
        self._codecs.tiers = self.store.tiers
        self.timings, self.links = (
            MachineTimings(settings.tiers, self.catalog),
            Links(settings.streams),
        )
        self.saves = BackgroundJobs("kv", settings.writer_queue, settings.history_buffer_bytes)
        self.jobs = BackgroundJobs("encode", MAX_WAITING_JOBS, finishes=True)
        self.shared_kv = SharedKV()
        self._profiles, self._lock = ProfileStore(self.catalog), threading.Lock()
        self._model: HFModel | None = None
        self._loading_s = (0.0, 0.0)
        self._profile: ModelProfile | None = None
        self._encoder: Encoder | None = None

    @property
    def model(self) -> HFModel:
        """The model, loaded at first use."""
        with self._lock:
            if self._model is None:
                began_s, given = time.perf_counter(), self._given
                model = (
                    given
                    if isinstance(given, HFModel)
                    else loaded(self.settings, self._profiles, given)
                )
                tenant = digest(model.fingerprint, self.settings.salt)
                if model is not given:
                    self._profiles.remember(model.profile)
                    remember_tenant(self.catalog, tenant, self.settings)
                ensure_tables(self._codecs, tenant, model, self.settings)
                self._model, self._loading_s = model, (began_s, time.perf_counter())
            return self._model

    def without_loading(self, began_s: float) -> float:
        """Return a time that a request came, later by what it then waited for the model to be
        loaded.

        Args:
            began_s: `time.perf_counter()` when it came.
        """
        first, end = self._loading_s
        return began_s + max(0.0, end - max(first, began_s))

    @property
    def digest(self) -> str:
        """The digest of model and tenant in every key (`ChunkKey.model`)."""
        return self.encoder.digest

    @property
    def encoder(self) -> Encoder:
        """The encoder that computes the KV of runs of tokens and stores it."""
        model, profile = self.model, self.profile
        with self._lock:
            if self._encoder is None:
                self._encoder = Encoder(
                    model,
                    self.store,
                    self.settings,
                    self.timings,
                    digest(model.fingerprint, self.settings.salt),
                    filler_tokens(self.settings, model.profile),
                    settle(self.settings.policy, self.settings.ratio, profile.default_choice)[1],
                )
            return self._encoder

    @property
    def profile(self) -> ModelProfile:
        """The model's profile: the one it came with, or one learned on this store."""
        model = self.model
        with self._lock:
            if self._profile is None:
                self._profile = self._profiles.joined(model.profile)
            return self._profile

    def learn(self, profile: ModelProfile) -> None:
        """Use this profile from now on, here and in later processes on this store."""
        self._profile, self._encoder = profile, None
        self._profiles.put(profile)

    @at_work()
    def verify(self, progress: Callable[[str], object] = ignore) -> Verdict:
        """Check with the model's real weights that fusing is exact where it must be; the profile
        keeps the verdict.
        """
        how = settle(self.settings.policy, self.settings.ratio, self.profile.default_choice)
        verdict = verify(self.model, *how, progress)
        self._profiles.judge(self.model.profile, verdict.passed)
        self._profile = replace(self.profile, verified=verdict.passed)
        return verdict


def filler_tokens(settings: Settings, profile: ModelProfile) -> int:
    """Return the tokens of filler text that chunks are encoded behind.

    A number that was set decides, then that which the model was trained with, then the default.
    """
    trained = profile.filler_tokens
    return (
        settings.filler_tokens
        if trained is None or "filler_tokens" in settings.model_fields_set
        else trained
    )


def loaded(settings: Settings, profiles: ProfileStore, given: LoadedModel | None = None) -> HFModel:
    """Return the model in the settings, or a given one; probed, unless its profile is stored.

    It is shared in the process by all that name it with the same options, or give the same model
    with the same weights. A folder or file that has changed since is loaded anew.
    """
    if settings.device.startswith("cpu") and (given is None or settings.threads != "auto"):
        limit_threads(None if settings.threads == "auto" else settings.threads)
    if given is not None:
        weights = weights_digest(given.model)
        name = "handed over", id(given.model), id(given.tokenizer), weights
        return shared_while_used(name, lambda: given.probed(weights, profiles.probed))
    named = (
        settings.model,
        settings.dtype,
        settings.device,
        *([settings.model_kwargs] if settings.model_kwargs else []),
    )
    return shared(
        ("model", *named),
        lambda: _load(settings, profiles),
        _version_of(Path(settings.model).expanduser()),
    )


def _version_of(place: Path) -> str:
    """Return what changes with a model's file, or with the files of its folder; "" where there is
    no model.
    """
    has_weights = place.is_file() or any(
        any(place.glob(name)) for name in ("*.safetensors", "*.gguf", CHUNK_ADAPTER)
    )
    return identity([place], {})[0] if has_weights else ""


def handed_over(
    given: Given, tokenizer: Tokens, settings: Settings
) -> tuple[LoadedModel | HFModel | None, Settings]:
    """Return the loaded model that was given (None: only a name was), and the settings adapted to
    it.

    Args:
        given: A name, path or loaded model; None: the model in the settings.
        tokenizer: The tokenizer of a loaded model.
        settings: The settings.

    Raises:
        ModelError: The combination is invalid; the message says why.
        SettingsError: A setting contradicts the loaded model.
    """
    if not isinstance(settings, Settings):
        raise ModelError(
            f"The first argument of Engine is Settings, found {settings!r:.60}. Give a model as"
            " Engine(model=...), and the folder of the store as Engine(Settings(store=...))."
        )
    if given is None or isinstance(given, str | Path | HFModel | LoadedModel):
        if tokenizer is not None:
            raise ModelError(
                "tokenizer= is only for a loaded transformers model, found none: other models have"
                " their own. Leave tokenizer= out."
            )
        if isinstance(given, HFModel | LoadedModel):
            return given, settings
        return None, (
            settings.model_copy(update={"model": str(given)}) if given is not None else settings
        )
    if settings.model_kwargs:
        raise ModelError(
            "model_kwargs only apply when ragfuse loads the model, and this one is loaded already."
            " Leave them out, or give the model's name."
        )
    found = LoadedModel.of(given, tokenizer)
    device, dtype = str(device_of(found.model)), str(found.model.dtype).removeprefix("torch.")
    _check_same(settings, "dtype", dtype)
    _check_same(settings, "device", device)
    return found, settings.model_copy(
        update={"model": found.name, "device": device, "dtype": dtype}
    )


def _check_same(settings: Settings, name: str, found: str) -> None:
    """Raise SettingsError for a setting that contradicts a loaded model; what the environment says
    does not count.
    """
    wanted = str(getattr(settings, name))
    is_same = wanted == found or (name == "device" and wanted == found.partition(":")[0])
    if not is_same and wanted not in ("auto", str(getattr(Settings(), name))):
        raise SettingsError(
            f"{name} is {wanted}, and that of the loaded model is {found}. Leave out {name}, as a"
            " loaded model has its own, or load the model so.",
            name,
        )


def _load(settings: Settings, profiles: ProfileStore) -> HFModel:
    """Load the model in the settings, and log how long it took."""
    began = time.perf_counter()
    source = resolve_llm(settings.model, settings.home)
    options = dict(settings.model_kwargs)
    if options.get("gguf_file") and isinstance(source, Path):
        raise ModelError(
            "gguf_file is for a file of a Hugging Face id. For a local model, give the file's path"
            " as model."
        )
    with quietly(source):
        model = load_model(
            source,
            settings.dtype,
            settings.device,
            profiles.probed,
            model_kwargs=options,
            home=settings.home,
        )
    model.name = settings.model
    _ = model.encoder  # made now, as the first prompt would wait for it
    log.info("Model loaded in %.1f s: %s.", time.perf_counter() - began, settings.model)
    return model
