"""The model that settings name, or that somebody loaded, from its weights to its profile."""

from __future__ import annotations

from pathlib import Path

from ragfuse.engine.model_profiles import Profiles, as_shipped
from ragfuse.errors import ModelError
from ragfuse.hf.fingerprint import weights_digest
from ragfuse.hf.model import HFModel
from ragfuse.hf.probe import device_of
from ragfuse.models import quietly, resolve_llm
from ragfuse.models.loader import Given, LoadedModel, Tokens, load_model
from ragfuse.process.shared import shared, shared_while_used
from ragfuse.settings import Settings


def loaded(settings: Settings, profiles: Profiles, given: LoadedModel | None = None) -> HFModel:
    """The model that settings name, or the one that was handed over; probed, unless it is known what it allows.

    One for all of the process that name it with the same options, or hand over the same one with the same weights.
    """
    if given is not None:
        weights = weights_digest(given.model)
        whose = "handed over", id(given.model), id(given.tokenizer), weights
        return shared_while_used(whose, lambda: given.probed(weights, profiles.probed))
    named = settings.model, settings.dtype, settings.device, *([settings.model_kwargs] if settings.model_kwargs else [])
    return shared(("model", *named), lambda: _load(settings, profiles))


def handed_over(given: Given, tokenizer: Tokens, settings: Settings) -> tuple[LoadedModel | None, Settings]:
    """A model that somebody loaded, None where it is only named, and the settings as they are with it."""
    if not isinstance(settings, Settings):
        raise ModelError(
            f"Wanted Settings first, found {settings!r:.60}. Name a model as Engine(model=...), and where KV lies as "
            "Engine(Settings(store=...))."
        )
    if given is None or isinstance(given, str | Path | HFModel):
        if tokenizer is not None:
            raise ModelError(
                "Wanted a loaded model beside tokenizer=..., found none: what is named brings its own. Leave it out."
            )
        return None, settings.model_copy(update={"model": str(given)}) if isinstance(given, str | Path) else settings
    if settings.model_kwargs:
        raise ModelError(
            "model_kwargs say how a model is loaded, and this one is loaded already. Leave them out, or name the model."
        )
    found = LoadedModel.of(given, tokenizer)
    device, dtype = str(device_of(found.model)), str(found.model.dtype).removeprefix("torch.")
    return found, settings.model_copy(update={"model": found.name, "device": device, "dtype": dtype})


def _load(settings: Settings, profiles: Profiles) -> HFModel:
    """The model that settings name, with the choice that an embedded one comes with."""
    source = resolve_llm(settings.model, settings.home)
    options = dict(settings.model_kwargs)
    if options.get("gguf_file") and isinstance(source, Path):
        raise ModelError("gguf_file names a file of a Hugging Face id; of a local model give the file's path as model.")
    with quietly(source):
        model = load_model(
            source, settings.dtype, settings.device, profiles.probed, model_kwargs=options, home=settings.home
        )
    model.name = settings.model
    model.profile = as_shipped(model.profile, settings.model)
    return model
