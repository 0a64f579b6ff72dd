"""Adapters that come along: LoRA weights for the embedded LLM, each in a folder with its model card.

Data and tiny loaders. They are trained by `training/`, and merged into the weights when a model is prepared.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from ragfuse.types.keys import digest

WEIGHTS = "adapter_model.safetensors"
DRIFT_NAME = "drift.safetensors"


def path(name: str) -> Path:
    """The folder of the adapter `name`."""
    return Path(str(files(__name__))) / name


def fingerprint(name: str) -> str:
    """Digest of its weights, and of its drift where that was measured."""
    return digest(*(file.read_bytes() for file in (path(name) / WEIGHTS, path(name) / DRIFT_NAME) if file.exists()))


def card(name: str) -> dict[str, Any] | None:
    """What was measured of it: `reached`, `f1` and what was `tried`; None where there is no such adapter."""
    file = path(name) / "card.json"
    if not name or not file.is_file():
        return None
    said: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return said
