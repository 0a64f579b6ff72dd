"""Every byte that decides a model's KV is part of its name, and each is read once."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ragfuse.errors import ModelError
from ragfuse.hf import fingerprint as module
from ragfuse.hf.fingerprint import weights_digest
from tests.kits import hf as kit
from tests.kits.families import FAMILIES

KINDS = ["llama", "bloom-alibi", "mixtral", "gemma2-softcap-window"]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, those too that no file holds."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def flip(tensor: Tensor, byte: int) -> None:
    """Change the lowest bit of one byte, in place."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[byte] ^= 1


def quantised(model: PreTrainedModel) -> nn.Module:
    """Its linear layers in eight bits, by torch's own dynamic quantisation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def with_lora(alpha: int = 16, seed: int = 0) -> PreTrainedModel:
    """A llama with adapters left in place, which are not zero."""
    config = LoraConfig(
        r=4, lora_alpha=alpha, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(kit.build("llama", {}), config)
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_()
    return model.get_base_model()


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_of_any_weight_or_buffer_is_another_key(kind):
    name, options = FAMILIES[kind][:2]
    model = kit.build(name, options)
    seen, chosen = {weights_digest(model)}, torch.Generator().manual_seed(1)
    tensors = tensors_of(model)
    for tensor in tensors.values():
        for byte in torch.randint(tensor.nbytes, (3,), generator=chosen).tolist():
            flip(tensor, byte)
            seen.add(weights_digest(model))
            flip(tensor, byte)
    assert len(seen) > 2 * len(tensors)
    assert weights_digest(model) in seen


def test_how_a_weight_lies_in_memory_is_not_part_of_the_key(
    monkeypatch,
):
    model = kit.build("llama", {})
    before = weights_digest(model)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data = weight.data.t().contiguous().t()
    monkeypatch.setattr(module, "HASH_NBYTES", 100)
    assert weights_digest(model) == before


def test_weights_in_eight_bits_are_named_by_all_their_bytes():
    plain, again, other, scaled = (kit.build("llama", {}) for _ in range(4))
    other.model.layers[2].mlp.up_proj.weight.data[5, 9] += 0.5
    scaled.model.layers[2].mlp.up_proj.weight.data *= 2  # the same eight bits, another scale
    names = [weights_digest(quantised(each)) for each in (plain, again, other, scaled)]
    assert names[0] == names[1]
    assert len({*names}) == 3


def test_weights_without_data_are_refused_by_name():
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(kit.build("llama", {}).config)
    with pytest.raises(ModelError, match=r"'.*weight' has no data"):
        weights_digest(empty)


def test_adapters_left_in_place_are_part_of_the_key():
    switched = with_lora()
    for layer in (each for each in switched.modules() if hasattr(each, "lora_A")):
        layer.enable_adapters(False)
    models = (kit.build("llama", {}), with_lora(), with_lora(alpha=32), with_lora(seed=1), switched)
    assert len({*map(weights_digest, models)}) == 5
    assert weights_digest(with_lora()) == weights_digest(models[1])
