"""The models that benchmarks name: shapes with random weights, or any model that ragfuse can load.

Speed depends on a model's shape, not on what it learned. What a model answers is measured
elsewhere, on real weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ragfuse_bench.random_model import random_model

from ragfuse.errors import ModelError, SettingsError
from ragfuse.hf.model import HFModel
from ragfuse.models import quietly, resolve_llm
from ragfuse.models.device import auto_dtype
from ragfuse.models.loader import load_model

DTYPES = ("bfloat16", "float32", "float16")


@dataclass(frozen=True)
class Preset:
    """A shape with random weights: its name, and its config in transformers' names."""

    name: str
    shape: Mapping[str, object]


def _preset(name: str, model_type: str, sizes: tuple[int, ...], tied: bool = False) -> Preset:
    layers, hidden, heads, kv_heads, intermediate, vocabulary = sizes
    shape = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
    }
    return Preset(name, MappingProxyType(shape))


PRESETS = (
    _preset("q05", "qwen2", (24, 896, 14, 2, 4864, 32000), tied=True),
    _preset("l1b", "llama", (16, 2048, 32, 8, 8192, 32000)),
    _preset("l8b", "llama", (32, 4096, 32, 8, 14336, 128256)),
    _preset("tiny", "llama", (4, 64, 4, 2, 128, 512)),
)
"""Shapes like Qwen2's with 0.4B parameters, like Llama's with 1.1B and 8B, and a tiny one."""


def preset(name: str) -> Preset | None:
    """The preset called `name`; None when there is none."""
    return next((known for known in PRESETS if known.name == name), None)


def bench_model(name: str, dtype: str, device: str, home: Path) -> HFModel:
    """The model to measure: a preset, an embedded name, a Hugging Face id or a folder."""
    dtype = auto_dtype(device) if dtype == "auto" else dtype
    if dtype not in DTYPES:
        raise SettingsError(f"No dtype '{dtype}'. It is one of: {', '.join(DTYPES)}.")
    known = preset(name)
    if known is not None:
        return random_model(known.shape, dtype, device)
    source = resolve_llm(name, home)
    with quietly(source):
        return load_model(source, dtype, device)


def fusable_model(name: str, dtype: str, device: str, home: Path, reads: bool = False) -> HFModel:
    """Return the model to measure; ModelError for one whose KV cannot be reused.

    Args:
        name: As `bench_model` takes it.
        dtype: Name of the dtype.
        device: Where it runs.
        home: The folder of prepared models.
        reads: Whether it has to read text; presets read none.
    """
    model = bench_model(name, dtype, device, home)
    if model.profile.refusal or (reads and not model.has_tokenizer):
        why = model.profile.refusal or "it has no tokenizer, so it reads no text."
        raise ModelError(f"{name} cannot be measured: {why} Measure another model.")
    return model
