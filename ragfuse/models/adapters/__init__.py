"""The LoRA adapters of the included LLM, each in a folder with a model card.

`training/` trains the adapters. An adapter is merged into the weights when a model is prepared. An
adapter's folder may have a subfolder with a chunk adapter for the merged model.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ragfuse.types.keys import digest

WEIGHTS = "adapter_model.safetensors"
DRIFT_NAME = "ragfuse_drift.kv"
CHUNK_ADAPTER = "chunk_adapter"
"""Name of the chunk adapter's folder inside a model's folder."""


def path(name: str) -> Path:
    """Return the folder of an adapter."""
    return Path(str(files(__name__))) / name


def fingerprint(name: str) -> str:
    """Return the digest of an adapter's weights, drift and chunk adapter."""
    names = WEIGHTS, DRIFT_NAME, f"{CHUNK_ADAPTER}/{WEIGHTS}"
    found = [each for each in names if (path(name) / each).exists()]
    return digest(*(part for each in found for part in (each, (path(name) / each).read_bytes())))
