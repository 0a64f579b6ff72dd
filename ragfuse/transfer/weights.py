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
N_TENSORS = 2048
"""The most tensors that count: of more, as many are taken at equal distances in the order of their
names.
"""
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
    files = _files(folder)
    names = sorted(files)
    step = max(1, -(-len(names) // N_TENSORS))
    by_file = dict[str, list[str]]()
    for name in names[::step]:
        by_file.setdefault(files[name], []).append(name)
    parts = dict[str, bytes]()
    for file, mine in by_file.items():
        with safe_open(folder / file, framework="pt") as opened:
            for name in mine:
                found = opened.get_slice(name)
                shape = found.get_shape()
                first = (
                    found[(*(slice(0, 1) for _ in shape[1:]), slice(0, N_VALUES))]
                    if shape
                    else found[...]
                )
                values = (
                    first.float()
                    .to(torch.bfloat16)
                    .contiguous()
                    .view(torch.int16)
                    .numpy()
                    .tobytes()
                )
                parts[name] = f"{name} {shape} ".encode() + values
    hasher = blake3()
    for name in sorted(parts):
        hasher.update(len(parts[name]).to_bytes(8, "little") + parts[name])
    return str(hasher.hexdigest(length=16)) if parts else UNKNOWN


def _files(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the tensor's name."""
    if (folder / _INDEX).is_file():
        told = json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in told.items()}
    with safe_open(folder / _WHOLE, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), _WHOLE)
