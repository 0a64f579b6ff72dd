"""`Runtime`, the state that the parts of an engine share, and `Encoder`, which computes stored KV.

Prefixes are encoded alone. Schema runs are encoded with the gaps between their positions. Chunks
are encoded after filler text. A chunk encoded at the start of a text would get attention sinks,
which occur only at the start. KV encoded after filler text is several times closer to full prefill,
anywhere in a prompt. So all prompts can share one entry for the chunk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ragfuse.engine.model_records import (
    MachineTimings,
    ensure_tables,
    judged_profile,
    profile_name,
    stored_profile,
)
from ragfuse.errors import ModelError, OverlongError, SettingsError
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
from ragfuse.plan.controller import choose_tier, settle
from ragfuse.process.jobs import BackgroundJobs, at_work
from ragfuse.process.shared import shared, shared_while_used
from ragfuse.schemas.layout import SchemaRun
from ragfuse.sessions.session_store import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.store import Catalog, KVStore, open_catalog, open_store
from ragfuse.store.catalog import remember_tenant
from ragfuse.text import filler_text
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.keys import ChunkKey, digest, filler_context, token_digest
from ragfuse.types.kv import ChunkKV
from ragfuse.types.profiles import ModelProfile

TOKEN_CHARS = 128
"""Maximum characters of a token in the largest vocabularies. Runs of spaces are the longest."""


def remaining_context(
    n_tokens: int,
    model: HFModel,
    what: str = "The prompt",
    advice: str = "Shorten the prompt, or use fewer or shorter chunks.",
    at_least: bool = False,
) -> int | None:
    """Return the number of tokens that fit after `n_tokens`; None if the model has no limit.

    Args:
        n_tokens: Tokens of the prompt.
        model: The model.
        what: What the error message calls the prompt.
        advice: The last sentence of the error message.
        at_least: True if `n_tokens` is only a lower bound.

    Raises:
        OverlongError: The prompt itself does not fit.
    """
    max_tokens = model.max_context
    if max_tokens is None:
        return None
    if n_tokens > max_tokens:
        raise OverlongError(
            f"{what} does not fit: {model.name} takes at most {max_tokens:,} tokens, found"
            f" {'at least ' if at_least else ''}{n_tokens:,}. {advice}",
            "prompt",
        )
    return max_tokens - n_tokens + 1


def ids_of(text: str, model: HFModel) -> list[int]:
    """Return a text's token ids; [] for a text so long that it cannot fit the context."""
    limit = model.max_context
    return model.tokens(text) if limit is None or len(text) // TOKEN_CHARS <= limit else []


GAP = "\n\n"
"""The text between the filler text and a chunk."""
PACE_S = 2.0
"""Maximum seconds that background work waits until any one slow tier has saved an entry."""


@dataclass(frozen=True)
class Encoder:
    """Computes and stores the KV of runs of tokens that are not in the store yet.

    Args:
        model: The model.
        store: The store.
        settings: The settings, of which `min_chunk_tokens` and `placement` are used.
        timings: Timings of this machine, for the choice of tiers.
        digest: Digest of model and tenant in keys.
        filler_tokens: Tokens of filler text before a chunk; 0 means that chunks are encoded alone.
        ratio: Returns the recompute ratio that applies unless a question sets one.
        pace_s: Maximum seconds to wait for a save. None means to wait for all tiers, without limit.
    """

    model: HFModel
    store: KVStore
    settings: Settings
    timings: MachineTimings
    digest: str
    filler_tokens: int
    ratio: Callable[[], float]
    pace_s: float | None = None

    def key(self, tokens: Sequence[int], context: str = "") -> ChunkKey:
        """Return the key of a run of tokens; `context` as in `ChunkKey`."""
        return ChunkKey(self.digest, token_digest(tokens), context)

    def key_of(self, run: SchemaRun) -> ChunkKey:
        """Return the key of a schema's run. Runs with different gaps have different keys."""
        return ChunkKey(
            self.digest, token_digest(run.tokens), "", run.layout(self.model.profile.fixed)
        )

    @property
    def shortest(self) -> int:
        """Minimum tokens of a stored run. Shorter runs are not stored."""
        return self.settings.min_chunk_tokens

    def home(self, n_tokens: int, nbytes: int) -> str | None:
        """Return the slow tier for a new chunk; None means all slow tiers.

        All slow tiers get the chunk if the setting `placement` is "all", if there are no timings,
        or if there are fewer than two slow tiers.
        """
        costs = self.timings.costs(self.model)
        slow = [tier.name for tier in self.store.tiers if tier.slow]
        if costs is None or len(slow) < 2 or self.settings.placement == "all":
            return None
        written = {tier: self.store.levels.of(tier) for tier in slow}
        return choose_tier(n_tokens, nbytes, costs, written, self.ratio())

    @property
    def context(self) -> str:
        """The context in chunk keys: a mark for filler text, or "" if `filler_tokens` is 0."""
        return filler_context("") if self.filler_tokens else ""

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Encode and store a prefix of prompts; return the bytes of new KV."""
        return self._put(tokens, self.key(tokens), lambda: self.model.encode(tokens))

    def keep_chunk(self, tokens: Sequence[int], persistent: bool = True) -> int:
        """Encode and store a chunk; return the bytes of new KV, 0 if the chunk was stored before.

        Args:
            tokens: The chunk's token ids.
            persistent: True to write the KV to slow tiers too. Pass False if the chunk's text is
                not in the catalog, because later processes could not find the chunk.
        """
        before = self.filler(len(tokens))
        encode = self.model.encode_with_filler if self.filler_tokens else self.model.encode
        return self._put(
            tokens,
            self.key(tokens, self.context),
            lambda: encode(tokens, before),
            persistent=persistent,
        )

    def filler(self, n_tokens: int) -> list[int]:
        """Return the filler tokens to encode before a chunk of `n_tokens` tokens."""
        room = remaining_context(n_tokens, self.model)
        other = self.filler_tokens if room is None else min(self.filler_tokens, room - 1)
        return self.model.tokens(filler_text() + GAP)[-other:] if other else []

    def keep_run(self, run: SchemaRun) -> int:
        """Encode and store a schema's run (Prompt Cache 3.3); return the bytes of new KV.

        The run is encoded from position 0 on, or at its schema positions if the model's KV cannot
        be moved.
        """
        start = run.start if self.model.profile.fixed else 0
        positions = [start + position for position in run.positions]
        encoded = lambda: self.model.encode_at(run.tokens, positions)  # noqa: E731
        return self._put(run.tokens, self.key_of(run), encoded, at_encoded_position=True)

    def _put(
        self,
        tokens: Sequence[int],
        key: ChunkKey,
        encoded: Callable[[], ChunkKV],
        at_encoded_position: bool = False,
        persistent: bool = True,
    ) -> int:
        """Encode and store a run, unless it is stored or too short; return the bytes of new KV.

        If the model's KV cannot be moved, only runs with `at_encoded_position` are stored.
        """
        profile = self.model.profile
        refused = profile.refusal and not (at_encoded_position and profile.fixed)
        if len(tokens) < self.shortest or refused:
            return 0
        return self.save(key, encoded, persistent)

    def save(
        self,
        key: ChunkKey,
        kv_of: Callable[[], ChunkKV],
        persistent: bool = True,
        exact: bool = False,
    ) -> int:
        """Store KV under a key unless the key is already stored; return the bytes of new KV.

        Args:
            key: The key.
            kv_of: Computes the KV; called only if the KV must be stored.
            persistent: True to write the KV to slow tiers too.
            exact: True to store the KV losslessly in the slowest of the fast tiers, instead of
                at that tier's own codec levels.
        """
        fast = [tier.name for tier in self.store.tiers if not tier.slow][-1:]
        raw = dict.fromkeys(fast, LEVEL_NAMES[:1]) if exact else {}
        found = self.store.lookup([key]).get(key)
        is_stored = found is not None and (not raw or LEVEL_NAMES[0] in found.sizes)
        if is_stored and (not persistent or self.store.is_persistent(key)):
            return 0
        if not persistent and not fast:
            return 0
        kv = kv_of()
        kept = self.store.put(
            key,
            kv,
            tier=None if persistent else fast[0],
            wait=self.pace_s is None,
            slow_tier=self.home(kv.n_tokens, kv.nbytes) if persistent else None,
            pace_s=self.pace_s or 0.0,
            levels=raw,
        )
        return kv.nbytes if kept else 0


log = logging.getLogger("ragfuse")

MAX_WAITING_JOBS = 256
"""Maximum queued jobs. If a job is dropped, the next question that needs it submits it again."""


class Runtime:
    """A model with its tenant, profile, encoder and store. Thread-safe.

    The model is loaded when `model` is first used.

    Args:
        settings: All settings.
        given: A loaded model. None means the model in the settings.
        store: An open store. None means to open the store in the settings.
        conversations: The index from KV keys to conversations, for the eviction policy.

    Attributes:
        catalog: The catalog of profiles, timings, sessions, schemas and texts of known chunks.
        loaded_s: `time.perf_counter()` when the model was loaded; 0.0 if not loaded yet.
        store: The store of encoded KV.
        timings: Timings of this machine.
        links: The network links to remote tiers, with measured throughput, by tier name.
        saves: The queue of jobs that save the KV of prompts.
        shared_kv: KV shared by concurrent answers.
        jobs: The queue of jobs that follow an answer: chunks to encode, passages to learn.
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
                f"Engine(store=...) takes an open KVStore, found {store!r:.60}. For a folder, use"
                " Engine(Settings(store='FOLDER'))."
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
        """The model, loaded on first use."""
        with self._lock:
            if self._model is None:
                self._model = self._opened()
                self.loaded_s = time.perf_counter()
            return self._model

    def _opened(self) -> HFModel:
        """Load the model, record its profile and tenant, and create its encoder."""
        settings, given = self.settings, self._given
        model = given if isinstance(given, HFModel) else loaded(settings, self._probed, given)
        tenant = digest(model.fingerprint, settings.salt)
        if model is not given:
            profile = model.profile.probed
            self.catalog.put(profile_name(profile.model), profile, replaces=False)
            remember_tenant(self.catalog, tenant, settings)
        ensure_tables(self.store.levels, tenant, model, settings)
        self._profile = judged_profile(self.catalog, model.profile)
        filler = model.profile.filler_tokens  # as when the chunk adapter was trained
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
        """Return a stored profile without verdicts. Engines with other stores may share a model."""
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
        """The model's profile, with the verdicts of `verify` and calibration on this store."""
        _ = self.model
        return self._profile

    def learn(self, profile: ModelProfile) -> None:
        """Save this profile. This process, and later ones with this store, use it from now on."""
        self._profile = profile
        self.catalog.strict.put(profile_name(profile.model), profile)

    @at_work()
    def verify(self, progress: Callable[[str], object] = lambda check: None) -> Verdict:
        """Run `hf.verify` on the model, and save the verdict in the model's profile."""
        how = settle(self.settings.policy, self.settings.ratio, self.profile.default_choice)
        verdict = verify(self.model, *how, progress)
        own, catalog = self.model.profile, self.catalog.strict
        kept = stored_profile(catalog, own.model) or own.probed  # without the model's own verdict
        catalog.put(profile_name(own.model), replace(kept, verified=verdict.passed))
        self._profile = replace(self.profile, verified=verdict.passed)
        return verdict


def loaded(settings: Settings, profile_of: ProfileOf, given: LoadedModel | None = None) -> HFModel:
    """Return the model in the settings, or the given model. Probe it if it has no stored profile.

    Calls for the same name and options share one model. Calls with the same model object share one
    `HFModel` while the weights are unchanged. A model whose folder or file changed is loaded again.
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
    """Return an id that changes with a model's files; "" if there are no such files."""
    has_weights = place.is_file() or any(
        any(place.glob(name)) for name in ("*.safetensors", "*.gguf", CHUNK_ADAPTER)
    )
    return identity([place], {}) if has_weights else ""


def handed_over(
    given: Given, tokenizer: Tokens, settings: Settings | None
) -> tuple[LoadedModel | HFModel | None, Settings]:
    """Return the given loaded model, and settings adapted to the model and to this machine.

    If `given` is a name, a path or None, the returned model is None.

    Args:
        given: A name, path or loaded model. None means the model in the settings.
        tokenizer: The tokenizer of a loaded model.
        settings: The settings. None means to read settings from the environment.

    Raises:
        ModelError: An argument is invalid or does not fit the others; the message says why.
        SettingsError: A setting contradicts the loaded model.
    """
    settings = Settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise ModelError(
            f"The first argument of Engine must be Settings, found {settings!r:.60}. Pass a model"
            " as Engine(model=...), and a store's folder as Engine(Settings(store=...))."
        )
    update, loaded = dict[str, str](), given if isinstance(given, HFModel | LoadedModel) else None
    is_named = given is None or isinstance(given, str | Path)
    if (is_named or loaded is not None) and tokenizer is not None:
        raise ModelError(
            "tokenizer= can be used only with a loaded transformers model; other models have"
            " their own tokenizer. Remove tokenizer=."
        )
    if is_named:
        update = {} if given is None else {"model": str(given)}
    elif loaded is None:
        if settings.model_kwargs:
            raise ModelError(
                "model_kwargs apply only when ragfuse loads the model, but this model is already"
                " loaded. Remove model_kwargs, or pass the model's name."
            )
        loaded = LoadedModel.of(given, tokenizer)
        device, dtype = str(device_of(loaded.model)), str(loaded.model.dtype).removeprefix("torch.")
        _check_same(settings, "dtype", dtype)
        _check_same(settings, "device", device)
        update = {"model": loaded.name, "device": device, "dtype": dtype}
    return loaded, resolve_auto(settings.model_copy(update=update).usable())


def _check_same(settings: Settings, name: str, found: str) -> None:
    """Raise SettingsError if a setting contradicts a loaded model."""
    wanted = str(getattr(settings, name))
    is_same = wanted == found or (name == "device" and wanted == found.partition(":")[0])
    if not is_same and wanted not in ("auto", str(getattr(Settings(), name))):
        raise SettingsError(
            f"{name} is {wanted}, but the loaded model has {found}. Remove {name}, or load the"
            f" model with {name} {wanted}.",
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
    _ = model.text_encoder  # made now, because the first prompt would wait for the text encoder
    log.info("Model loaded in %.1f s: %s.", time.perf_counter() - began, settings.model)
    return model
