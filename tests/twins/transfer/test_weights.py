"""Digests of weights: the same for the same weights, however they are stored, and for no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ragfuse.transfer import UNKNOWN, sample_weights


def weights(n: int = 3, seed: int = 1) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    found = {
        f"layers.{at}.weight": torch.randn(8, 100, generator=made).bfloat16().float()
        for at in range(n)
    }
    return {
        **found,
        "norm.weight": torch.ones(8),
        "scale": torch.tensor(0.5),
        "empty": torch.zeros(0, 4),
    }


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_files_divided_otherwise_and_another_dtype_hold_the_same_weights(tmp_path: Path) -> None:
    found = sample_weights(saved(tmp_path / "whole", weights()))
    assert len(found) == 32
    assert (
        sample_weights(
            saved(tmp_path / "half", {name: each.bfloat16() for name, each in weights().items()})
        )
        == found
    )
    divided = tmp_path / "divided"
    divided.mkdir()
    files = {name: f"model-{at % 2}.safetensors" for at, name in enumerate(weights())}
    for file in set(files.values()):
        save_file(
            {name: each for name, each in weights().items() if files[name] == file}, divided / file
        )
    (divided / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert sample_weights(divided) == found


@pytest.mark.parametrize("name", ["layers.1.weight", "norm.weight", "scale"])
def test_another_value_shape_or_name_is_another_digest(name: str, tmp_path: Path) -> None:
    plain = weights()
    found = [sample_weights(saved(tmp_path / "plain", plain))]
    for at, changed in enumerate(
        (
            {**plain, name: plain[name] * 1.5},
            {**plain, name: torch.ones(9, 100)},
            {**plain, f"{name}s": plain[name].clone()},
        )
    ):
        found.append(sample_weights(saved(tmp_path / str(at), changed)))
    assert len(set(found)) == 4


@pytest.mark.parametrize("what", ["nothing", "a damaged file", "a missing part"])
def test_weights_that_cannot_be_read_are_unknown(what: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", weights())
    if what == "a damaged file":
        (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    elif what == "a missing part":
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "b.safetensors"}})
        )
    assert sample_weights(None if what == "nothing" else folder) == UNKNOWN
