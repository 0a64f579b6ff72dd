"""The model that settings name, from its weights to its profile."""

from __future__ import annotations

from ragfuse.gate import Profiles, as_shipped
from ragfuse.hf.model import HFModel, load_model
from ragfuse.models import quietly, resolve_llm
from ragfuse.settings import Settings


def loaded(settings: Settings, profiles: Profiles) -> HFModel:
    """The model that settings name, with the choice that an embedded one comes with; probed, unless that is known."""
    source = resolve_llm(settings.model, settings.home)
    with quietly(source):
        model = load_model(source, settings.dtype, settings.device, profiles.probed)
    model.name = settings.model
    model.profile = as_shipped(model.profile, settings.model)
    return model
