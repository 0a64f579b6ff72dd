"""The quality gate: whether blending may be used with a model unless told otherwise, and what is said of it.

`verify` finds out whether fusing is exact where it must be, `ragfuse calibrate` whether answers stay close to full
prefill's; both verdicts are kept in the model's profile. A model of which nothing is known runs at the conservative
default, and that is said once.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version
from typing import TypeVar

from ragfuse.models import embedded
from ragfuse.plan.controller import AUTO, MEASURED
from ragfuse.process.fork import ForkLock
from ragfuse.store.catalog import Catalog
from ragfuse.types.profiles import PROFILE_VERSION, ModelProfile
from ragfuse.types.reasons import NOT_EXACT, NOT_SAFE

T = TypeVar("T")
log = logging.getLogger("ragfuse")


def refusal_of(profile: ModelProfile, policy: str) -> str:
    """Why a prompt is answered by full prefill; "" where it may be blended: always by a policy that was asked for."""
    if profile.refusal or policy != AUTO:
        return profile.refusal
    return NOT_EXACT if profile.verified is False else NOT_SAFE if profile.safe is False else ""


def as_shipped(profile: ModelProfile, name: str) -> ModelProfile:
    """The profile of the model `name` with the choice that an embedded one comes with."""
    ours = embedded(name)
    return profile.calibrated(True, *ours.choice) if ours is not None and ours.choice else profile


class ProfileStore:
    """Model profiles as one store's catalog keeps them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def get(self, fingerprint: str) -> ModelProfile | None:
        """What was kept of a model; None where nothing was."""
        found = self._catalog.get(_name(fingerprint))
        return ModelProfile.from_dict(found) if found else None

    def probed(self, fingerprint: str) -> ModelProfile | None:
        """The same without what was learned of it on this store: for a model that others share."""
        found = self.get(fingerprint)
        return found.probed if found else None

    def joined(self, own: ModelProfile) -> ModelProfile:
        """What came with a model, and over it what was learned on this store."""
        kept = self.get(own.model)
        if kept is None:
            return own
        return kept if kept.safe is not None else replace(own, verified=kept.verified)

    def judge(self, own: ModelProfile, verified: bool) -> None:
        """Keep what verify says of a model, and nothing else of what came with it."""
        found = self._catalog.strict.get(_name(own.model))
        kept = ModelProfile.from_dict(found) if found else None
        self.put(replace(kept or own.probed, verified=verified))

    def remember(self, profile: ModelProfile) -> None:
        """Keep what the probe found, unless something is kept."""
        found = profile.probed.as_dict()
        self._catalog.settle(_name(profile.model), found)

    def put(self, profile: ModelProfile) -> None:
        """Keep a profile in place of an earlier one; StoreError where the catalog cannot be written."""
        self._catalog.strict.put(_name(profile.model), profile.as_dict())


def _name(fingerprint: str) -> str:
    """A profile is only as good as the libraries it was measured with."""
    return f"model-{fingerprint}-{PROFILE_VERSION}-torch-{version('torch')}-transformers-{version('transformers')}"


class CalibrationHint:
    """Says once, in the log, that a model is not calibrated, and what to do."""

    def __init__(self) -> None:
        self._lock, self._said = ForkLock(), False

    def give(self, profile: ModelProfile, policy: str, model: str) -> None:
        """Say it if it is so and was not said."""
        with self._lock:
            if self._said or policy != AUTO or profile.choice is not None:
                return
            self._said = True
        name, ratio = MEASURED
        log.warning(
            "%s is not calibrated: %s at %.0f%% is used. Find its own best, and whether blending is safe with it: "
            "ragfuse calibrate --model %s --docs PATH",
            *(model, name, 100 * ratio, model),
        )
