"""The quality gate: model profiles, and whether chunks may be blended with a model by default.

`verify` checks that fusing is exact where it must be, `ragfuse calibrate` that answers stay close
to a full prefill's; the model's profile keeps both verdicts. A model without verdicts runs at a
conservative default, and a log line says so once.
"""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ragfuse.hf.model import HFModel
from ragfuse.models.device import auto_dtype
from ragfuse.settings import Settings
from ragfuse.store.catalog import CatalogFile
from ragfuse.types.plan import AUTO, NOT_EXACT, NOT_SAFE
from ragfuse.types.profiles import PROFILE_VERSION, ModelProfile

log = logging.getLogger("ragfuse")


def refusal_of(profile: ModelProfile, policy: str) -> str:
    """Return why a model's prompts need a full prefill; "" where they may be blended.

    The verdicts of `verify` and calibration count for the policy "auto" only, not for one that was
    asked for.
    """
    if profile.refusal or policy != AUTO:
        return profile.refusal
    return NOT_EXACT if profile.verified is False else NOT_SAFE if profile.safe is False else ""


def stored_profile(catalog: CatalogFile, fingerprint: str) -> ModelProfile | None:
    """Return the profile of a model that a catalog has; None where it has none."""
    return catalog.get(profile_name(fingerprint), ModelProfile)


def judged_profile(catalog: CatalogFile, own: ModelProfile) -> ModelProfile:
    """Return the model's own profile, overridden by the verdicts in a catalog."""
    stored = stored_profile(catalog, own.model)
    if stored is None:
        return own
    judged = stored if stored.safe is not None else replace(own, verified=stored.verified)
    return replace(judged, filler_tokens=own.filler_tokens)


def profile_name(fingerprint: str) -> str:
    """Return a profile's name in the catalog; it has the library versions, since a profile is valid
    for these only.
    """
    versions = f"torch-{version('torch')}-transformers-{version('transformers')}"
    return f"model-{fingerprint}-{PROFILE_VERSION}-{versions}"


def name_for_calibrate(setting: str, name: str) -> str:
    """Return the name by which `ragfuse calibrate` finds a model.

    Args:
        setting: The model in the settings.
        name: The model's own name; a server shortens a path to its last part. If it is another
            model than that in the settings, the engine was given one.
    """
    return setting if name in (setting, Path(setting).name) else name


def options_for(settings: Settings, model: HFModel, has_store: bool = True) -> list[str]:
    """Return the options of a command that judges or times a model as it is here: what is not the
    command's default.

    An access token is left out.

    Args:
        settings: The settings of the engine, or those that the command line was given.
        model: The loaded model.
        has_store: Whether the command takes --store.
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
    """Return the command that calibrates a model as it is here, for documents at PATH."""
    named = "--model", name_for_calibrate(settings.model, model.name)
    options = options_for(settings, model)
    return shlex.join(["ragfuse", "calibrate", *named, *options, "--docs", "PATH"])


def hint(profile: ModelProfile, settings: Settings, model: HFModel) -> None:
    """Log that a model is not calibrated, and what to do about it."""
    name, ratio = profile.default_choice
    log.warning(
        "%s is not calibrated, so the default is used: policy %s, which recomputes %.0f%% of the"
        " reused tokens. To find what suits this model, and whether reuse is safe with it: %s",
        name_for_calibrate(settings.model, model.name),
        name,
        100 * ratio,
        calibrate_command(settings, model),
    )
