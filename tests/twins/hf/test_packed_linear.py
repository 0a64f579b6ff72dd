"""Packed weights: the same products, no second copy, and nobody who asks a layer for its weight is
the wiser.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ragfuse.hf.model import HFModel, fingerprint
from ragfuse.hf.packed_linear import PackedLinear, can_pack, pack
from ragfuse.hf.probe import decoder_layers
from ragfuse.models.loader import load_model
from tests.kits import hf as kit
from tests.kits.families import FAMILIES

CPU = torch.device("cpu")
packs = pytest.mark.skipif(
    not can_pack(CPU, torch.bfloat16) or kit.DEVICE != CPU,
    reason="the tests run on a GPU, or this CPU has no bfloat16 products to pack for",
)
SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 256,
}


def built(family: str) -> HFModel:
    kind, options = FAMILIES[family][:2]
    return HFModel(kit.build(kind, options, dtype=torch.bfloat16), kit.tokenizer())


@packs
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n_in", "n_out"), [(96, 160), (64, 1), (100, 37), (7, 640)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 40), (1, 333), (1, 0)])
def test_a_packed_layer_multiplies_as_exactly_as_the_plain_one_and_gives_its_weight_back(
    shape, n_in, n_out, bias
):
    torch.manual_seed(n_in + n_out)
    plain = nn.Linear(n_in, n_out, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(shape[0], n_in, 2 * shape[1], dtype=torch.bfloat16).transpose(1, 2)[:, ::2]
    exact = x.double() @ plain.weight.double().T + (plain.bias.double() if bias else 0.0)
    packed = PackedLinear(plain)
    found = packed(x)
    assert found.shape == exact.shape
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-8)
    # the weight comes back as it was, and no other copy is held
    assert not list(packed.parameters())
    assert all(map(torch.equal, packed.state_dict().values(), plain.state_dict().values()))
    assert list(packed.state_dict()) == list(plain.state_dict())


@packs
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2-softcap-window"])
def test_a_packed_model_prefills_and_fuses_as_before(family):
    plain, model = built(family), built(family)
    pack(model.model)
    before, after = plain.model.state_dict(), model.model.state_dict()
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert fingerprint(model.model, model.tokenizer) == plain.fingerprint
    scene = kit.usual()
    for policy, ratio in (("lego", 0.3), ("full", 1.0)):
        wanted, found = (kit.fuse(each, scene, policy, ratio) for each in (plain, model))
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0.05, atol=0.05)
    wanted, found = (each.full_prefill(scene.token_ids) for each in (plain, model))
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0.05, atol=0.05)


@packs
@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(),
    reason="this system does not list what a process has mapped",
)
def test_the_file_that_weights_came_from_is_let_go(tmp_path):
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPE), dtype=torch.bfloat16
    ).save_pretrained(tmp_path)
    kit.tokenizer().save_pretrained(tmp_path)
    model = load_model(tmp_path, "bfloat16")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(
        torch.equal(weight, model.model.state_dict()[name])
        for name, weight in plain.state_dict().items()
    )


@packs
def test_a_loaded_model_comes_packed(varied_path):
    layers = decoder_layers(load_model(varied_path, "bfloat16").model)
    kinds = {type(module) for layer in layers for module in layer.modules()}
    assert PackedLinear in kinds
    assert nn.Linear not in kinds


def test_other_dtypes_and_devices_are_not_packed(varied_path):
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)
    model = load_model(varied_path, "float32").model
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
