"""What the catalog records of a model: profile, verdicts, timings and codec tables."""

from __future__ import annotations

import json
import logging
import platform
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from ragfuse.codec import Codec, CodecTables, LayerMeta, codec_for, profile_tables
from ragfuse.hf.model import HFModel
from ragfuse.hf.rounding_error import query_sizes, rounding_costs
from ragfuse.load.timings import Progress, measure
from ragfuse.models.device import auto_dtype
from ragfuse.plan.cost import COST_VERSION, CostModel, Observed
from ragfuse.process.jobs import at_work
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog
from ragfuse.store.levels import TierLevels, wants_tables
from ragfuse.text import sample
from ragfuse.types.keys import digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.plan import AUTO, NOT_EXACT, NOT_SAFE, LoadPlan
from ragfuse.types.profiles import PROFILE_VERSION, ModelProfile

log = logging.getLogger("ragfuse.engine")


def refusal_of(profile: ModelProfile, policy: str, blends: bool = True, moves: bool = True) -> str:
    """Return the reason why a model's prompts need a full prefill; "" if stored KV may be reused.

    The verdicts of `verify` and calibration apply only to the policy "auto". An explicit policy,
    from the settings or the question, overrides these verdicts.

    Args:
        profile: The model's profile.
        policy: A selection policy, or "auto".
        blends: True if chunks are blended. Calibration's verdict applies only to blending.
        moves: True if KV is moved away from the positions at which it was encoded.
    """
    refusal = profile.refusal if moves or not profile.fixed else ""
    if refusal or policy != AUTO:
        return refusal
    if profile.verified is False:
        return NOT_EXACT
    return NOT_SAFE if blends and profile.safe is False else ""


def stored_profile(catalog: Catalog, fingerprint: str) -> ModelProfile | None:
    """Return a model's profile from a catalog; None if the catalog has none."""
    return catalog.get(profile_name(fingerprint), ModelProfile)


def judged_profile(catalog: Catalog, own: ModelProfile) -> ModelProfile:
    """Return the profile `own`, with the catalog's verdicts of `verify` and calibration."""
    stored = stored_profile(catalog, own.model)
    if stored is None:
        return own
    judged = stored if stored.safe is not None else replace(own, verified=stored.verified)
    return replace(judged, filler_tokens=own.filler_tokens)


def profile_name(fingerprint: str) -> str:
    """Return a profile's catalog name. It contains the versions of torch and transformers."""
    versions = f"torch-{version('torch')}-transformers-{version('transformers')}"
    return f"model-{fingerprint}-{PROFILE_VERSION}-{versions}"


def name_for_calibrate(setting: str, name: str) -> str:
    """Return the name by which `ragfuse calibrate` finds a model.

    Args:
        setting: The model in the settings.
        name: The loaded model's name. It equals `setting`, or (on a server) the file name in
            `setting`. A different name means that the engine was given a loaded model.
    """
    return setting if name in (setting, Path(setting).name) else name


def options_for(settings: Settings, model: HFModel, has_store: bool = True) -> list[str]:
    """Return the command-line options that load the model as it was loaded here.

    Args:
        settings: The settings of the engine or of the command.
        model: The loaded model.
        has_store: True if the command takes --store.
    """
    device, dtype = str(model.device), str(model.dtype).removeprefix("torch.")
    loading = {name: value for name, value in settings.model_kwargs.items() if name != "token"}
    return [
        *(["--dtype", dtype] if dtype != auto_dtype(device) else []),
        *(["--device", device] if device != Settings.model_fields["device"].default else []),
        *(["--model-kwargs", json.dumps(loading)] if loading else []),
        *(["--store", str(settings.store)] if has_store and settings.store is not None else []),
    ]


def calibrate_command(settings: Settings, model: HFModel) -> str:
    """Return the command that calibrates a model as loaded here. PATH stands for the documents."""
    named = "--model", name_for_calibrate(settings.model, model.name)
    options = options_for(settings, model)
    return shlex.join(["ragfuse", "calibrate", *named, *options, "--docs", "PATH"])


def hint(profile: ModelProfile, settings: Settings, model: HFModel) -> None:
    """Log that a model is not calibrated, with the command that calibrates it."""
    name, ratio = profile.default_choice
    log.warning(
        "%s is not calibrated, so the default is used: policy %s, which recomputes %.0f%% of the"
        " reused tokens. To find a suitable policy, and whether reuse is safe: %s",
        name_for_calibrate(settings.model, model.name),
        name,
        100 * ratio,
        calibrate_command(settings, model),
    )


class MachineTimings:
    """This machine's timings, by model, device and number of threads. Thread-safe.

    Args:
        tiers: URLs of the tiers besides memory and disk. Timings are valid for these tiers only.
        catalog: The store's catalog, in which the timings are saved.
    """

    def __init__(self, tiers: Sequence[str], catalog: Catalog) -> None:
        self._catalog, self._lock = catalog, threading.Lock()
        self._known: dict[str, Observed] = {}
        self._environment = version("torch"), version("transformers"), *tiers

    def machine(self, model: HFModel) -> CostModel | None:
        """Return the measured costs for torch's current number of threads; None if not measured."""
        with self._lock:
            return self._of(model).measured

    def costs(self, model: HFModel) -> CostModel | None:
        """Return the measured costs, corrected by the loading times of recent answers.

        If this machine was not measured, the costs are estimated from recent prefills and have no
        tiers. If there was no prefill yet either, return None.
        """
        with self._lock:
            return self._of(model).applied(model.n_layers)

    def learn(self, costs: CostModel) -> None:
        """Save these timings. This process, and others with this store, use them from now on.

        Raises:
            StoreError: The catalog cannot be written.
        """
        name = self.name(costs.model, costs.device, costs.threads)
        with self._lock:
            self._known[name] = Observed(costs)
        self._catalog.strict.put(name, costs)

    @at_work()
    def measure(self, model: HFModel, store: KVStore, tenant: str, progress: Progress) -> CostModel:
        """Time a model and a store's tiers on this machine; save and use the timings.

        Args:
            model: The loaded model.
            store: The store whose tiers are timed.
            tenant: The digest of model and tenant. The codecs of this model and tenant are timed.
            progress: Called with the name of the current timing, and the share done (0 to 1).

        Raises:
            StoreError: The timings cannot be written to the catalog.
        """
        codecs = partial(store.levels.codec, model=tenant)
        costs = measure(model, store.tiers, progress, codecs=codecs)
        self.learn(costs)
        return costs

    def note(
        self, model: HFModel, plan: LoadPlan, load_s: float | None, compute_s: float | None
    ) -> None:
        """Record the seconds that a plan's loading and computing took; None means unknown."""
        with self._lock:
            known = self._of(model)
            if load_s is not None and plan.forecast is not None:
                known = known.loaded(plan, load_s)
            if compute_s is not None:
                known = known.computed(plan, model.n_layers, compute_s)
            self._known[self._name_of(model)] = known

    def name(self, fingerprint: str, device: str, threads: int) -> str:
        """Return the catalog name of timings. It differs by machine, library versions and tiers."""
        gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
        environment = digest(platform.node(), gpu, *self._environment)
        return f"machine-{fingerprint}-{device}-{threads}-{COST_VERSION}-{environment[:12]}"

    def _name_of(self, model: HFModel) -> str:
        return self.name(model.fingerprint, str(model.device), torch.get_num_threads())

    def _of(self, model: HFModel) -> Observed:
        """Return the observed timings of a model. The caller must hold the lock."""
        name = self._name_of(model)
        known, found = self._known.get(name), self._catalog.get(name, CostModel)
        if known is None or found not in (None, known.measured):
            known = self._known[name] = Observed(found)
        return known


SAMPLE_TOKENS = 240
"""Maximum tokens of one sample text; two sample texts fit the context of any model."""


COST_LEVEL = "cg3"
"""The codec level at which each layer's cost of rounding errors is measured."""


CONTEXT_TOKENS = 768
"""Maximum tokens whose KV is rounded to measure the cost of rounding errors."""


CONTINUATION_TOKENS = 256
"""Maximum tokens after the rounded KV. Worse predictions of these tokens mean a higher cost."""


def ensure_tables(levels: TierLevels, digest: str, model: HFModel, settings: Settings) -> None:
    """Set a model's codec tables if a tier's codec level needs tables. Make tables if none exist.

    Args:
        levels: The codec levels of the store's tiers, and the known tables.
        digest: The digest of model and tenant in keys.
        model: The loaded model, whose profile gets the tables.
        settings: The settings, which set the codec levels written to each tier.
    """
    if model.profile.refusal or not wants_tables(settings):
        return
    found = CodecTables.from_dict(model.profile.codec) or levels.tables(digest)
    found = found or made_tables(model)
    levels.learn(digest, found)
    model.profile = replace(model.profile, codec=found.as_dict())


def made_tables(model: HFModel) -> CodecTables:
    """Return a model's codec tables, profiled on the package's sample texts.

    A layer's quantization bins depend on the layer's cost of rounding errors. Preliminary tables
    serve to measure this cost.
    """
    began, chunks = time.perf_counter(), [*_chunks(model)]
    known = model.profile.rope, _queries(model)
    tables = profile_tables(chunks, *known)
    if found := rounding_costs(
        model, *_split_sample(model), _rounded(codec_for(COST_LEVEL, tables))
    ):
        tables = profile_tables(chunks, *known, found)
    seconds = time.perf_counter() - began
    log.info(
        "Prepared the compression of KV for %s in %.1f s (codec tables %s)",
        model.name,
        seconds,
        tables.digest,
    )
    return tables


def _rounded(codec: Codec) -> Callable[[ChunkKV], ChunkKV]:

    def rounded(layer: LayerKV, at: int) -> LayerKV:
        blob = codec.encode(layer, at)
        return codec.decode(blob, LayerMeta.of(layer, blob))

    return lambda kv: ChunkKV(tuple(rounded(layer, at) for at, layer in enumerate(kv.layers)))


def _split_sample(model: HFModel) -> tuple[list[int], list[int]]:
    """Return two runs of tokens: two of every three sample texts, and the remaining texts."""
    runs = _runs(model)
    before, follow = (
        [token for run in some for token in run] for some in (runs[::3] + runs[1::3], runs[2::3])
    )
    max_tokens = model.max_context or 2 * SAMPLE_TOKENS
    n_follow = min(CONTINUATION_TOKENS, max_tokens // 4)
    return before[: min(CONTEXT_TOKENS, max_tokens - n_follow)], follow[:n_follow]


def _chunks(model: HFModel) -> Iterator[ChunkKV]:
    """Yield the KV of every sample text. The filler before each text is the previous text."""
    before: Sequence[int] = ()
    for ids in _runs(model):
        yield model.encode_with_filler(ids, before)
        before = ids


def _runs(model: HFModel) -> list[list[int]]:
    """Return the token ids of each sample text, at most `SAMPLE_TOKENS` of each text."""
    return [model.tokens(text)[:SAMPLE_TOKENS] for text in sample()]


def _queries(model: HFModel) -> tuple[Tensor, ...]:
    """Return query magnitudes by layer, `[kv_heads, head_dim]`; () if the keys' shapes differ."""
    runs = _runs(model)
    sizes, layers = query_sizes(model, runs), model.encode(runs[0][:2]).layers
    shapes = [tuple(size.shape) for size in sizes]
    return (
        sizes if shapes == [(layer.keys.shape[0], layer.keys.shape[2]) for layer in layers] else ()
    )
