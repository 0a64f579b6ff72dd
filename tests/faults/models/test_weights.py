"""Weights that are damaged, incomplete or of another model are rejected, with their names, before
they answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ragfuse import Engine, ModelError
from ragfuse.models.loader import load_model

Weights = dict[str, Tensor]
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"


@pytest.fixture
def adapter(folder, tmp_path, retell):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    retell(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(folder))
    return tmp_path / "adapter"


def rewrite(file: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def named(weights: Weights, end: str) -> str:
    return next(name for name in sorted(weights) if name.endswith(end))


@pytest.mark.parametrize("name", [MODEL, ADAPTER])
def test_a_truncated_weights_file_is_an_error(folder, adapter, name):
    file = (folder if name == MODEL else adapter) / name
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match=str(folder if name == MODEL else adapter)):
        load_model(adapter, "float32")


def test_a_shard_that_is_missing_is_named(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / MODEL).unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    load_model(folder, "float32")
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        load_model(folder, "float32")


def remove(weights: Weights) -> None:
    del weights[named(weights, "up_proj.weight")]


def halve(weights: Weights) -> None:
    name = named(weights, "up_proj.weight")
    weights[name] = weights[name][::2].contiguous()


@pytest.mark.parametrize("damage", [remove, halve])
def test_weights_that_are_missing_or_of_another_shape_are_named(folder, damage):
    rewrite(folder / MODEL, damage)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(folder, "float32")


@pytest.mark.parametrize(
    "change", [{"r": 8}, {"target_modules": ["nothing"]}, {"target_modules": ["q_proj", "o_proj"]}]
)
def test_an_adapter_that_does_not_fit_is_an_error_with_its_folder(adapter, change, retell):
    load_model(adapter, "float32")
    retell(adapter / "adapter_config.json", **change)
    with pytest.raises(ModelError, match=f"'{adapter}'"):
        load_model(adapter, "float32")


def test_a_model_that_computes_nan_says_so(folder, tiny_settings):
    def spoil(weights: Weights) -> None:
        weights[named(weights, "up_proj.weight")].fill_(float("nan"))

    rewrite(folder / MODEL, spoil)
    settings = tiny_settings.model_copy(update={"model": str(folder)})
    with (
        Engine(settings) as engine,
        pytest.raises(ModelError, match=r"computed NaN .+ The weight files may be damaged"),
    ):
        engine.answer([("user", "How many ships?")])
