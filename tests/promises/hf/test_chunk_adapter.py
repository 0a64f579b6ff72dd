"""A chunk adapter changes the KV of chunks behind filler text, by as much as PEFT's adapter would,
and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ragfuse.errors import ModelError
from ragfuse.hf.chunk_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraAdapter
from ragfuse.hf.model import HFModel
from ragfuse.hf.packed_linear import PackedLinear
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.loader import load_model
from tests.kits import hf as kit
from tests.twins.hf.test_packed_linear import packs

CHUNK, FILLER = list(range(5, 45)), list(range(60, 80))


def model_at(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def filled(adapter: LoraAdapter) -> LoraAdapter:
    """The adapter with random weights, as one that has learnt."""
    generator = torch.Generator().manual_seed(2)
    for weight in adapter.weights.values():
        weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return adapter


@pytest.fixture
def folder(tiny_path, tmp_path):
    """A folder to give as a model: the tiny model with a chunk adapter."""
    adapter = filled(LoraAdapter(model_at(tiny_path), 4, 0, str(tiny_path)))
    adapter.save(tmp_path / "model" / CHUNK_ADAPTER)
    return tmp_path / "model"


def test_chunks_are_those_of_the_adapted_model_and_all_else_is_the_plain_one(folder, tiny_path):
    model, plain = load_model(folder, "float32"), load_model(tiny_path, "float32")
    adapted = PeftModel.from_pretrained(model_at(tiny_path), folder / CHUNK_ADAPTER)
    wanted = HFModel(adapted.merge_and_unload()).encode(CHUNK, FILLER)
    found = model.encode_with_filler(CHUNK, FILLER)
    torch.testing.assert_close(kit.states(found), kit.states(wanted), rtol=1e-4, atol=1e-4)
    with pytest.raises(IndexError):  # and a failed encoding leaves the model plain
        model.encode_with_filler([10**6], FILLER)
    for behind in ([], FILLER):
        assert kit.apart(model.encode(CHUNK, behind), plain.encode(CHUNK, behind)) == 0.0
    assert torch.equal(model.full_prefill(CHUNK).logits, plain.full_prefill(CHUNK).logits)
    assert kit.apart(model.encode_with_filler(CHUNK, FILLER), found) == 0.0


@packs
def test_packed_layers_apply_a_chunk_adapter(folder, tiny_path):
    packed, loose = load_model(folder, "bfloat16"), load_model(folder, "bfloat16", pack=False)
    assert any(isinstance(module, PackedLinear) for module in packed.model.modules())
    one, other = (each.encode_with_filler(CHUNK, FILLER).layers[-1] for each in (packed, loose))
    torch.testing.assert_close(one.values, other.values, rtol=0.05, atol=0.05)
    plain = packed.encode(CHUNK, FILLER).layers[-1]
    assert not torch.allclose(one.values, plain.values, rtol=0.05, atol=0.05)


def test_a_chunk_adapter_is_part_of_the_fingerprint(folder, tiny_path):
    def name_of(path: Path) -> str:
        return load_model(path, "float32").fingerprint

    prints = {name_of(folder), name_of(tiny_path)}
    file, config = (folder / CHUNK_ADAPTER / name for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG))
    weights = load_file(file)
    weights[next(name for name in weights if "lora_B" in name)][0, 0] += 1
    save_file(weights, file)
    prints.add(name_of(folder))
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 1}))
    assert len(prints | {name_of(folder)}) == 4


def test_an_adapter_that_is_damaged_or_does_not_fit_is_an_error(folder):
    file, config = (folder / CHUNK_ADAPTER / name for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG))
    weights = load_file(file)
    cut = {n: weight for n, weight in weights.items() if "layers.0.mlp.up_proj.lora_B" not in n}
    for damaged in (cut, {n: weight.T.contiguous() for n, weight in weights.items()}):
        save_file(damaged, file)
        with pytest.raises(ModelError, match="does not fit"):
            load_model(folder, "float32")
    file.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder, "float32")
    config.write_bytes(b"{")
    with pytest.raises(ModelError, match=ADAPTER_CONFIG):
        load_model(folder, "float32")
