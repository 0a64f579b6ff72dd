"""A digest of a few values of each weight, by which two engines tell whether they have the same
model.

KV of other weights with the same shapes would be taken for right and give wrong answers. Both
engines read the digest from the files that they load, within milliseconds; hashing all of a large
model takes much longer.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

UNKNOWN = "unknown"
"""Stands for the digest of weights that were not read from safetensors files, or changed since;
equals any other.
"""
N_VALUES = 64
"""The most values of a tensor that count."""
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


@functools.lru_cache(maxsize=8)
def sample_weights(folder: Path | None) -> str:
    """Return the digest of a model's weights: 32 hex digits, or `UNKNOWN` where the folder has no
    safetensors files.

    Names, shapes and the first values of tensors count, rounded to bfloat16, so that files which
    are divided otherwise, or hold the same weights in another dtype, give the same digest. The
    files of a folder are read once.

    Args:
        folder: The folder of the model; None: not known.
    """
    try:
        return UNKNOWN if folder is None else _sample(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return UNKNOWN


def _sample(folder: Path) -> str:
    index, files = folder / _INDEX, {_WHOLE}
    if index.is_file():
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    parts = dict[str, bytes]()
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                found = opened.get_slice(name)
                shape = found.get_shape()
                places = (*(slice(0, 1) for _ in shape[1:]), slice(0, N_VALUES)) if shape else ...
                first = found[places].float().to(torch.bfloat16).contiguous()
                values = first.view(torch.int16).numpy().tobytes()
                parts[name] = f"{name} {shape} ".encode() + values
    hasher = blake3()
    for name in sorted(parts):
        hasher.update(len(parts[name]).to_bytes(8, "little") + parts[name])
    return str(hasher.hexdigest(length=16)) if parts else UNKNOWN
