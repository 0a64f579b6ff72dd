"""Load weights and adapters, only from safetensors and GGUF files. Nothing is unpickled.

transformers and PEFT fill missing weights with random numbers and skip weights that do not fit.
This module raises an error in both cases.

Hashing a large model takes seconds, so digests of weights and tokenizers are cached. The cache key
depends on paths, sizes, inodes and times of files, on library versions and on loading options.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedConfig, PreTrainedModel

from ragfuse.errors import ModelError
from ragfuse.hf.chunk_adapter import ADAPTER_WEIGHTS
from ragfuse.process.folders import make_own_folder
from ragfuse.types.keys import digest

DIGESTS = re.compile("([0-9a-f]{32}) ([0-9a-f]{32})")


def identity(places: Iterable[Path], options: Mapping[str, Any]) -> str:
    """Return an id that changes when weight files, libraries or options change.

    The id is "" if there are no files, if a file cannot be read, or if `options` is not JSON.

    Args:
        places: The files, or folders of the files.
        options: The loading options.
    """
    try:
        options_json = json.dumps(dict(options), sort_keys=True)
        under = (
            path for place in places for path in ([place] if place.is_file() else place.rglob("*"))
        )
        files = sorted({path.resolve() for path in under if path.is_file()})
        stats = [(str(path), path.stat()) for path in files]
    except (TypeError, ValueError, OSError):
        return ""
    lines = [
        f"{path} {at.st_size} {at.st_ino} {at.st_mtime_ns} {at.st_ctime_ns}" for path, at in stats
    ]
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers")]
    return digest("weights", options_json, *libraries, *lines) if lines else ""


def kept_file(home: Path | None, places: Iterable[Path], options: Mapping[str, Any]) -> Path | None:
    """Return the file in `home` that caches a model's digests. None if caching is impossible."""
    name = identity(places, options) if home is not None else ""
    return home.expanduser() / "fingerprints" / name if home is not None and name else None


def kept_digests(file: Path) -> tuple[str, str] | None:
    """Read the digests of weights and tokenizer from a cache file; None if this fails."""
    try:
        found = DIGESTS.fullmatch(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return (found[1], found[2]) if found else None


def keep_digests(file: Path, weights: str, words: str) -> None:
    """Write the digests of weights and tokenizer to a cache file; ignore write errors."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        make_own_folder(file.parent)
        partial.write_text(f"{weights} {words}", encoding="ascii")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)


def load_weights(
    source: str | Path, dtype: str, device: str, options: Mapping[str, Any]
) -> PreTrainedModel:
    """Load a model, without the tokenizer, from a folder or a Hugging Face id.

    Args:
        source: The folder or id.
        dtype: The name of a torch dtype.
        device: The device of the model, unless `options` has a `device_map`.
        options: Options of `from_pretrained`.

    Raises:
        ModelError: Weights are missing or have the wrong shape.
        Exception: Any error of transformers.
    """
    options, folder = dict(options), Path(source)
    if options.get("gguf_file"):
        options["quantization_config"] = GgufConfig(dequantize=True)
    quantised = options.get("quantization_config")
    if not quantised:
        config, _ = PreTrainedConfig.get_config_dict(source, **options)
        quantised = config.get("quantization_config")
    if quantised:
        options.setdefault("device_map", {"": device})
    if isinstance(options.get("device_map"), Mapping):
        options["device_map"] = dict(options["device_map"])
    with (
        warnings.catch_warnings(action="ignore", category=FutureWarning),
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),
    ):  # warnings of libraries, not for the user
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # rejected below
            output_loading_info=True,
            **options,
        )
    names = {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])}
    if names:
        raise ModelError(
            f"The weights in '{folder / options.get('gguf_file', '')}' do not match the"
            f" configuration: {len(names):,} tensors are missing or have the wrong shape, such as"
            f" {', '.join(sorted(names)[:3])}. Copy all files of the model again."
        )
    if options.get("gguf_file") and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are no longer quantised
    return model if "device_map" in options else model.to(device)


def load_adapted(model: PreTrainedModel, folder: Path, merge: bool | None) -> nn.Module:
    """Apply an adapter to a base model. Return the model with merged weights, or a PEFT model.

    Args:
        model: The base model, which is modified.
        folder: The folder with the adapter's config and weights, as PEFT saves them.
        merge: True to merge. None means True unless the base model is quantised.

    Raises:
        ModelError: The adapter is of an unsupported kind, or has no safetensors weights.
        Exception: Any error of PEFT, for example if weights are incomplete or do not fit.
    """
    from peft import PeftConfig, PeftModel

    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"'{folder}' has no {ADAPTER_WEIGHTS}. Save the adapter with save_pretrained(...);"
            " pickled weights are not loaded."
        )
    refuse_outside(PeftConfig.from_pretrained(str(folder)))
    with warnings.catch_warnings():
        # peft uses a deprecated name of transformers
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("error", message="Found missing adapter keys")
        adapted = PeftModel.from_pretrained(model, folder)
        if merge if merge is not None else not is_quantised(model):
            merged: nn.Module = adapted.merge_and_unload()
            return merged
    return adapted


def refuse_outside(config: Any) -> None:
    """Raise ModelError if an adapter does not change layers in the same way for every prompt."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    kind = "activated LoRA" if getattr(config, "alora_invocation_tokens", None) else kind
    if getattr(config, "is_prompt_learning", False) or kind in ("activated LoRA", "XLORA", "POLY"):
        raise ModelError(
            f"{kind} adapters are not supported: an adapter must change layers in the same way"
            " for every prompt, as LoRA does. Use another adapter, or none."
        )


def is_quantised(model: nn.Module) -> bool:
    """Return whether the model was loaded with quantised weights."""
    config = getattr(model, "config", None)
    return getattr(config, "quantization_config", None) is not None
