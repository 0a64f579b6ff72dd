"""Weights that are damaged, incomplete or of another model are rejected, with their names, before they answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ragfuse import Engine, ModelError, Settings
from ragfuse.models.loader import load_model

Weights = dict[str, Tensor]
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"


@pytest.fixture
def folder(varied_path: Path, tmp_path: Path) -> Path:
    shutil.copytree(varied_path, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    written = tmp_path / "adapter" / "adapter_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"base_model_name_or_path": str(folder)}))
    return tmp_path / "adapter"


def rewrite(file: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def named(weights: Weights, end: str) -> str:
    return next(name for name in sorted(weights) if name.endswith(end))


@pytest.mark.parametrize("left", [0, 2, 5000])
@pytest.mark.parametrize("name", [MODEL, ADAPTER])
def test_a_file_that_was_cut_off_is_named(folder: Path, adapter: Path, name: str, left: int) -> None:
    file = (folder if name == MODEL else adapter) / name
    file.write_bytes(file.read_bytes()[:left])
    for asked in [folder, adapter] if name == MODEL else [adapter]:
        with pytest.raises(ModelError, match=rf"Wanted weights in '{file}', found a damaged file \(.+\)\. Copy"):
            load_model(asked, "float32")


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / MODEL).unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    load_model(folder, "float32")
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        load_model(folder, "float32")


@pytest.mark.parametrize("n", [1, 2])
def test_missing_weights_are_not_filled_with_random_ones(folder: Path, n: int) -> None:
    def remove(weights: Weights) -> None:
        for end in ("up_proj.weight", "down_proj.weight")[:n]:
            del weights[named(weights, end)]

    rewrite(folder / MODEL, remove)
    which = "up_proj.weight is" if n == 1 else "down_proj.weight and 1 more are"
    with pytest.raises(ModelError, match=rf"asks for, found that model\.layers\.0\.mlp\.{which} missing\. Copy the w"):
        load_model(folder, "float32")


def test_weights_of_another_shape_are_named_with_both_shapes(folder: Path) -> None:
    def halve(weights: Weights) -> None:
        name = named(weights, "up_proj.weight")
        weights[name] = weights[name][::2].contiguous()

    rows = load_file(folder / MODEL)["model.layers.0.mlp.up_proj.weight"].shape[0]
    rewrite(folder / MODEL, halve)
    with pytest.raises(ModelError, match=rf"shape \[{rows}, \d+\] for model\.layers\.0.+ found \[{rows // 2}, \d+\]\."):
        load_model(folder, "float32")


def test_further_weights_do_no_harm(folder: Path) -> None:
    rewrite(folder / MODEL, lambda weights: weights.update({"vision_tower.weight": torch.ones(3)}))
    assert load_model(folder, "float32").n_layers


@pytest.mark.parametrize(
    ("modules", "what"),
    [
        (["q_proj", "v_proj", "o_proj"], r"lora_A.*weight and 5 more are missing in adapter_model"),
        (["q_proj"], "lora_A.*weight and 5 more are of modules that adapter_config"),
    ],
)
def test_an_adapter_has_the_weights_of_all_modules_that_it_names(adapter: Path, modules: list[str], what: str) -> None:
    load_model(adapter, "float32")
    written = adapter / "adapter_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"target_modules": modules}))
    with pytest.raises(ModelError, match=f"does not fit its own configuration or its base model: .*{what}"):
        load_model(adapter, "float32")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"r": 8}, r"state_dict for .+: size mismatch for .+\. Its files have to be of one model"),
        ({"target_modules": ["nothing"]}, r"Target modules .+ not found"),
    ],
)
def test_an_adapter_that_does_not_fit_is_an_error_with_its_folder(
    adapter: Path, change: dict[str, Any], what: str
) -> None:
    written = adapter / "adapter_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | change))
    with pytest.raises(ModelError, match=f"'{adapter}' .*{what}"):
        load_model(adapter, "float32")


def test_a_model_that_computes_nan_says_so(folder: Path, tiny_settings: Settings) -> None:
    def spoil(weights: Weights) -> None:
        weights[named(weights, "up_proj.weight")].fill_(float("nan"))

    rewrite(folder / MODEL, spoil)
    settings = tiny_settings.model_copy(update={"model": str(folder)})
    with Engine(settings) as engine, pytest.raises(ModelError, match=r"computed NaN .+ Its weights are damaged"):
        engine.answer([("user", "How many ships?")])
