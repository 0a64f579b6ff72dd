"""What the parts of an engine share: store, queues, and the model, loaded at first use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ragfuse.engine.encoder import Encoder
from ragfuse.engine.model_records import (
    MachineTimings,
    ensure_tables,
    judged_profile,
    profile_name,
    stored_profile,
)
from ragfuse.errors import ModelError, SettingsError
from ragfuse.hf.cache import SharedKV
from ragfuse.hf.fingerprint import weights_digest
from ragfuse.hf.model import HFModel
from ragfuse.hf.probe import device_of
from ragfuse.hf.verify import Verdict, verify
from ragfuse.load.stream import Link
from ragfuse.models import quietly, resolve_llm
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.device import limit_threads, resolve_auto
from ragfuse.models.loader import Given, LoadedModel, ProfileOf, Tokens, load_model
from ragfuse.models.weights import identity
from ragfuse.plan.controller import settle
from ragfuse.process.jobs import BackgroundJobs, at_work
from ragfuse.process.shared import shared, shared_while_used
from ragfuse.sessions.session_store import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.store import Catalog, KVStore, open_catalog, open_store
from ragfuse.store.catalog import remember_tenant
from ragfuse.types.keys import digest
from ragfuse.types.profiles import ModelProfile

log = logging.getLogger("ragfuse")

MAX_WAITING_JOBS = 256
"""Most jobs that may wait; dropped ones are submitted again by the next question."""


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
        loaded_s: `time.perf_counter()` when the model was loaded; 0.0 before.
        store: Where encoded KV is stored.
        timings: Timings of this machine.
        links: The links to remote tiers by name, with their throughput.
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
        if not isinstance(store, KVStore | None):
            raise SettingsError(
                f"store= takes an open KVStore, found {store!r:.60}. Give a folder as"
                " Settings(store=...)."
            )
        self.catalog = open_catalog(settings) if store is None else Catalog(None)
        self.store = store or open_store(settings, conversations.evict(settings))
        self.timings = MachineTimings(settings.tiers, self.catalog)
        self.links = dict[str, Link]()
        self.saves = BackgroundJobs("kv", settings.writer_queue, settings.history_buffer_bytes)
        self.jobs = BackgroundJobs("encode", MAX_WAITING_JOBS, finishes=True)
        self.shared_kv = SharedKV()
        self._lock = threading.Lock()
        self._model: HFModel | None = None
        self.loaded_s = 0.0
        self._profile: ModelProfile
        self._encoder: Encoder

    @property
    def model(self) -> HFModel:
        """The model, loaded at first use."""
        with self._lock:
            if self._model is None:
                self._model = self._opened()
                self.loaded_s = time.perf_counter()
            return self._model

    def _opened(self) -> HFModel:
        """Load the model, note its profile and tenant, and make its encoder."""
        settings, given = self.settings, self._given
        model = given if isinstance(given, HFModel) else loaded(settings, self._probed, given)
        tenant = digest(model.fingerprint, settings.salt)
        if model is not given:
            profile = model.profile.probed
            self.catalog.put(profile_name(profile.model), profile, replaces=False)
            remember_tenant(self.catalog, tenant, settings)
        ensure_tables(self.store.levels, tenant, model, settings)
        self._profile = judged_profile(self.catalog, model.profile)
        filler = model.profile.filler_tokens  # as it was trained
        if filler is None or "filler_tokens" in settings.model_fields_set:
            filler = settings.filler_tokens
        self._encoder = Encoder(
            model,
            self.store,
            settings,
            self.timings,
            tenant,
            filler,
            lambda: settle(settings.policy, settings.ratio, self._profile.default_choice)[1],
        )
        return model

    def _probed(self, fingerprint: str) -> ModelProfile | None:
        """Return a model's stored profile without verdicts, as engines share the model."""
        found = stored_profile(self.catalog, fingerprint)
        return found.probed if found else None

    @property
    def digest(self) -> str:
        """The digest of model and tenant in every key (`ChunkKey.model`)."""
        return self.encoder.digest

    @property
    def encoder(self) -> Encoder:
        """The encoder that computes the KV of runs of tokens and stores it."""
        _ = self.model
        return self._encoder

    @property
    def profile(self) -> ModelProfile:
        """The model's profile: the one it came with, or one learned on this store."""
        _ = self.model
        return self._profile

    def learn(self, profile: ModelProfile) -> None:
        """Use this profile from now on, here and in later processes on this store."""
        self._profile = profile
        self.catalog.strict.put(profile_name(profile.model), profile)

    @at_work()
    def verify(self, progress: Callable[[str], object] = ignore) -> Verdict:
        """Check on the real weights that fusing is exact where it must be; keep the verdict."""
        how = settle(self.settings.policy, self.settings.ratio, self.profile.default_choice)
        verdict = verify(self.model, *how, progress)
        own, catalog = self.model.profile, self.catalog.strict
        kept = stored_profile(catalog, own.model) or own.probed  # no other verdict of its own
        catalog.put(profile_name(own.model), replace(kept, verified=verdict.passed))
        self._profile = replace(self.profile, verified=verdict.passed)
        return verdict


def loaded(settings: Settings, profile_of: ProfileOf, given: LoadedModel | None = None) -> HFModel:
    """Return the model in the settings, or a given one; probed, unless its profile is stored.

    It is shared in the process by all that name it with the same options, or give the same model
    with the same weights. A folder or file that has changed since is loaded anew.
    """
    if settings.device.startswith("cpu") and (given is None or settings.threads != "auto"):
        limit_threads(None if settings.threads == "auto" else settings.threads)
    if given is not None:
        weights = weights_digest(given.model)
        name = "handed over", id(given.model), id(given.tokenizer), weights
        make: Callable[[], HFModel] = lambda: HFModel(  # noqa: E731
            given.model, given.tokenizer, profile_of, weights=weights
        )
        return shared_while_used(name, make)
    named = (
        settings.model,
        settings.dtype,
        settings.device,
        *([settings.model_kwargs] if settings.model_kwargs else []),
    )
    return shared(
        ("model", *named),
        lambda: _load(settings, profile_of),
        _version_of(Path(settings.model).expanduser()),
    )


def _version_of(place: Path) -> str:
    """Return what changes with a model's files; "" where there is no model."""
    has_weights = place.is_file() or any(
        any(place.glob(name)) for name in ("*.safetensors", "*.gguf", CHUNK_ADAPTER)
    )
    return identity([place], {}) if has_weights else ""


def handed_over(
    given: Given, tokenizer: Tokens, settings: Settings | None
) -> tuple[LoadedModel | HFModel | None, Settings]:
    """Return the loaded model that was given (None: only a name was), and the settings adapted to
    it and to this machine.

    Args:
        given: A name, path or loaded model; None: the model in the settings.
        tokenizer: The tokenizer of a loaded model.
        settings: The settings; None: those of the environment.

    Raises:
        ModelError: The combination is invalid; the message says why.
        SettingsError: A setting contradicts the loaded model.
    """
    settings = Settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise ModelError(
            f"The first argument of Engine is Settings, found {settings!r:.60}. Give a model as"
            " Engine(model=...), and the folder of the store as Engine(Settings(store=...))."
        )
    update, loaded = dict[str, str](), given if isinstance(given, HFModel | LoadedModel) else None
    is_named = given is None or isinstance(given, str | Path)
    if (is_named or loaded is not None) and tokenizer is not None:
        raise ModelError(
            "tokenizer= is only for a loaded transformers model, found none: other models have"
            " their own. Leave tokenizer= out."
        )
    if is_named:
        update = {} if given is None else {"model": str(given)}
    elif loaded is None:
        if settings.model_kwargs:
            raise ModelError(
                "model_kwargs only apply when ragfuse loads the model, and this one is loaded"
                " already. Leave them out, or give the model's name."
            )
        loaded = LoadedModel.of(given, tokenizer)
        device, dtype = str(device_of(loaded.model)), str(loaded.model.dtype).removeprefix("torch.")
        _check_same(settings, "dtype", dtype)
        _check_same(settings, "device", device)
        update = {"model": loaded.name, "device": device, "dtype": dtype}
    return loaded, resolve_auto(settings.model_copy(update=update).usable())


def _check_same(settings: Settings, name: str, found: str) -> None:
    """Raise SettingsError for a setting that contradicts a loaded model."""
    wanted = str(getattr(settings, name))
    is_same = wanted == found or (name == "device" and wanted == found.partition(":")[0])
    if not is_same and wanted not in ("auto", str(getattr(Settings(), name))):
        raise SettingsError(
            f"{name} is {wanted}, and that of the loaded model is {found}. Leave out {name}, as a"
            " loaded model has its own, or load the model so.",
            name,
        )


def _load(settings: Settings, profile_of: ProfileOf) -> HFModel:
    began = time.perf_counter()
    source = resolve_llm(settings.model, settings.home)
    with quietly(source):
        model = load_model(
            source,
            settings.dtype,
            settings.device,
            profile_of,
            model_kwargs=dict(settings.model_kwargs),
            home=settings.home,
        )
    model.name = settings.model
    _ = model.text_encoder  # made now, as the first prompt would wait for it
    log.info("Model loaded in %.1f s: %s.", time.perf_counter() - began, settings.model)
    return model
