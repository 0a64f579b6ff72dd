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
from typing import TypeVar

from ragfuse.hf.model import HFModel
from ragfuse.models.dtypes import auto_dtype
from ragfuse.settings import Settings
from ragfuse.store.catalog import Catalog
from ragfuse.types.policy_cost import AUTO
from ragfuse.types.profiles import PROFILE_VERSION, ModelProfile
from ragfuse.types.reasons import NOT_EXACT, NOT_SAFE

T = TypeVar("T")
log = logging.getLogger("ragfuse")


def refusal_of(profile: ModelProfile, policy: str) -> str:
    """Return why a model's prompts need a full prefill; "" where they may be blended.

    The verdicts of `verify` and calibration count for the policy "auto" only, not for one that was
    asked for.
    """
    if profile.refusal or policy != AUTO:
        return profile.refusal
    return NOT_EXACT if profile.verified is False else NOT_SAFE if profile.safe is False else ""


class ProfileStore:
    """The model profiles in one store's catalog, by fingerprint of the model."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def get(self, fingerprint: str) -> ModelProfile | None:
        """Return a model's stored profile; None where there is none."""
        found = self._catalog.get(_name(fingerprint))
        return ModelProfile.from_dict(found) if found else None

    def probed(self, fingerprint: str) -> ModelProfile | None:
        """Return a model's stored profile without the verdicts of this store, for a model that
        engines share.
        """
        found = self.get(fingerprint)
        return found.probed if found else None

    def joined(self, own: ModelProfile) -> ModelProfile:
        """Return the model's own profile, overridden by the verdicts of this store."""
        stored = self.get(own.model)
        if stored is None:
            return own
        judged = stored if stored.safe is not None else replace(own, verified=stored.verified)
        return replace(judged, filler_tokens=own.filler_tokens)

    def judge(self, own: ModelProfile, verified: bool) -> None:
        """Store the verdict of `verify` on a model, without other verdicts that its own profile
        has.

        Raises:
            StoreError: The catalog cannot be read or written.
        """
        found = self._catalog.strict.get(_name(own.model))
        stored = ModelProfile.from_dict(found) if found else None
        self.put(replace(stored or own.probed, verified=verified))

    def remember(self, profile: ModelProfile) -> None:
        """Store the probe's findings about a model, unless a profile is stored already."""
        found = profile.probed.as_dict()
        self._catalog.settle(_name(profile.model), found)

    def put(self, profile: ModelProfile) -> None:
        """Store a profile in place of an earlier one; raise StoreError where the catalog cannot be
        written.
        """
        self._catalog.strict.put(_name(profile.model), profile.as_dict())


def _name(fingerprint: str) -> str:
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
    """Return the command that calibrates a model as it is here, for documents at PATH.

    A model that was given as an object may come from no folder, or from one that is gone: it is
        saved first.
    """
    name = name_for_calibrate(settings.model, model.name)
    is_nowhere = not Path(name).exists() and (
        Path(name).is_absolute() or not model.model.config._name_or_path
    )
    named = ["--model", "FOLDER" if is_nowhere else name, *options_for(settings, model)]
    first = (
        "model.save_pretrained('FOLDER'), tokenizer.save_pretrained('FOLDER'), then "
        if is_nowhere
        else ""
    )
    return first + shlex.join(["ragfuse", "calibrate", *named, "--docs", "PATH"])


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
