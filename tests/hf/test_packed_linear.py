"""Packed weights: the same products, no second copy, and nobody who asks a layer for its weight is
the wiser.
"""

from pathlib import Path

import pytest
import torch
from ragfuse_bench.random_model import random_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, KVSource, Prefill, fingerprint
from ragfuse.hf.packed_linear import PackedLinear, can_pack, pack
from ragfuse.hf.probe import decoder_layers
from ragfuse.models.loader import load_model
from tests.hf import kit
from tests.hf.families import FAMILIES

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


def linear(n_in: int = 96, n_out: int = 160, bias: bool = True) -> nn.Linear:
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, bias=bias, dtype=torch.bfloat16)


def built(family: str) -> HFModel:
    kind, options = FAMILIES[family][:2]
    return HFModel(kit.build(kind, options, dtype=torch.bfloat16), kit.tokenizer())


def fused(model: HFModel, ids: list[int], policy: str, ratio: float) -> Prefill:
    runs = [CachedRun(0, 10, 30, 10, True), CachedRun(1, 30, 50, 30, True)]
    source = KVSource([model.encode(ids[run.lo : run.hi]) for run in runs])
    return model.fuse(ids, torch.arange(len(ids)), runs, source, policy, ratio)


@packs
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n_in", "n_out"), [(96, 160), (64, 1), (100, 37), (7, 640)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 40), (1, 333), (1, 0)])
def test_a_packed_layer_multiplies_as_exactly_as_the_plain_one(
    shape: tuple[int, int], n_in: int, n_out: int, bias: bool
) -> None:
    plain = linear(n_in, n_out, bias)
    x = torch.randn(shape[0], n_in, 2 * shape[1], dtype=torch.bfloat16).transpose(1, 2)[:, ::2]
    exact = x.double() @ plain.weight.double().T + (plain.bias.double() if bias else 0.0)
    found = PackedLinear(plain)(x)
    assert found.shape == exact.shape
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-8)


@packs
def test_the_weight_comes_back_as_it_was_and_no_other_copy_is_held() -> None:
    plain = linear()
    packed = PackedLinear(plain)
    assert torch.equal(packed.weight, plain.weight)
    assert not list(packed.parameters())
    state = packed.state_dict()
    assert list(state) == ["weight", "bias"]
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@packs
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2-softcap-window"])
def test_a_packed_model_prefills_fuses_and_writes_as_before(family: str) -> None:
    plain, model = built(family), built(family)
    pack(model.model)
    before, after = plain.model.state_dict(), model.model.state_dict()
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert fingerprint(model.model, model.tokenizer) == plain.fingerprint
    ids = [3 + (7 * index) % 200 for index in range(60)]
    for wanted, found in (
        (plain.full_prefill(ids), model.full_prefill(ids)),
        (fused(plain, ids, "lego", 0.3), fused(model, ids, "lego", 0.3)),
    ):
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0.05, atol=0.05)
    options = {"max_new_tokens": 4, "do_sample": False}
    said = [generate(each, fused(each, ids, "hkvd", 1.0), options) for each in (plain, model)]
    assert len(said[1]) == len(said[0]) == 4


@packs
@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(),
    reason="this system does not list what a process has mapped",
)
def test_the_file_that_weights_came_from_is_let_go(tmp_path: Path) -> None:
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
def test_decoder_layers_are_found_in_a_packed_model_among_other_lists_of_that_length() -> None:
    model = kit.build("llama", {}, dtype=torch.bfloat16)
    layers = decoder_layers(model)
    model.other = nn.ModuleList(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in layers)
    pack(model)
    assert decoder_layers(model) == layers
    assert all(isinstance(layer.mlp.up_proj, PackedLinear) for layer in layers)
    assert type(model.other[0]) is nn.Linear
    assert isinstance(model.lm_head, PackedLinear)


@packs
def test_loaded_and_random_models_come_packed(varied_path: Path) -> None:
    for model in (load_model(varied_path, "bfloat16"), random_model(SHAPE, "bfloat16")):
        assert any(isinstance(module, PackedLinear) for module in model.model.modules())
        assert not any(
            type(m) is nn.Linear for layer in decoder_layers(model.model) for m in layer.modules()
        )


def test_other_dtypes_and_devices_stay_as_they_are(varied_path: Path) -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)
    for model in (load_model(varied_path, "float32"), random_model(SHAPE, "float32")):
        assert not any(isinstance(module, PackedLinear) for module in model.model.modules())
