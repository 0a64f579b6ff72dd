"""Quantised weights and adapters: each is fused exactly, or refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragfuse import ModelError
from ragfuse.hf.fingerprint import weights_digest
from ragfuse.hf.model import HFModel
from ragfuse.hf.verify import verify
from ragfuse.models.loader import load_model
from tests.kits import hf as kit

SCHEMES = ["int8", "int8-dynamic", "int4"]


def torchao_or_skip() -> Any:
    return pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed: make test-torchao"
    )


def scheme(name: str) -> Any:
    """How torchao is to quantise linear layers; what a CPU multiplies."""
    torchao = torchao_or_skip()
    return {
        "int8": torchao.Int8WeightOnlyConfig(),
        "int8-dynamic": torchao.Int8DynamicActivationInt8WeightConfig(),
        "int4": torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=torchao.PerGroup(32)
        ),
    }[name]


def quantised(model: Any, name: str) -> Any:
    torchao_or_skip().quantize_(
        model, scheme(name), filter_fn=lambda module, path: isinstance(module, nn.Linear)
    )
    return model


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_weights_that_torchao_quantised_are_fused_exactly(name):
    model = HFModel(quantised(kit.build("llama", {}), name), kit.tokenizer())
    assert model.profile.refusal == ""
    verdict = verify(model)
    assert verdict.passed, [check for check in verdict.checks if not check.passed]


def test_products_in_eight_bits_are_fused_exactly_or_refused_with_the_reason():
    """What flows through is rounded too, by the range of each row: more than weights alone
    explain.
    """
    model = HFModel(quantised(kit.build("llama", {}), "int8-dynamic"), kit.tokenizer())
    assert verify(model).passed == (not model.profile.refusal)
    assert model.full_prefill(kit.ids(20)).logits.isfinite().all()


@pytest.mark.parametrize("name", SCHEMES)
def test_any_changed_quantisation_state_is_another_key(name):
    def made(change: str = "") -> str:
        model = kit.build("llama", {})
        if change == "weight":
            model.model.layers[1].mlp.up_proj.weight.data[3] += 0.7
        if change == "scale":  # every weight twice as large: the same integers
            model.model.layers[1].mlp.up_proj.weight.data *= 2
        return weights_digest(quantised(model, name))

    assert made() == made()
    assert len({made(), made("weight"), made("scale"), weights_digest(kit.build("llama", {}))}) == 4


def test_a_folder_is_quantised_while_it_is_loaded(varied_path):
    torchao = torchao_or_skip()
    from transformers import TorchAoConfig

    options = {"quantization_config": TorchAoConfig(torchao.Int8WeightOnlyConfig())}
    model = load_model(varied_path, "float32", model_kwargs=options)
    assert "Int8Tensor" in type(model.model.model.layers[0].mlp.up_proj.weight).__name__
    assert verify(model).passed
    assert model.fingerprint != load_model(varied_path, "float32").fingerprint


@pytest.mark.parametrize("bits", [4, 8])
def test_a_folder_of_packed_weights_is_fused_exactly(bits, varied_path, tmp_path):
    """As compressed-tensors packs them: what vLLM's tools write."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = AutoModelForCausalLM.from_pretrained(varied_path, dtype=torch.float32)
    scheme = preset_name_to_scheme(f"W{bits}A16", ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 32
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen"
        ),
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            size = scheme.weights.group_size or module.weight.shape[1]
            groups = module.weight.data.reshape(len(module.weight), -1, size)
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    packer = ModelCompressor.from_pretrained_model(model)
    packer.compress_model(model)
    model.save_pretrained(tmp_path)
    packer.update_config(str(tmp_path))
    AutoTokenizer.from_pretrained(varied_path).save_pretrained(tmp_path)
    found = load_model(tmp_path, "float32")
    assert "weight_scale" in dict(found.model.model.layers[0].mlp.up_proj.named_parameters())
    assert verify(found).passed
    assert found.fingerprint != load_model(varied_path, "float32").fingerprint


def test_a_quantisation_whose_package_is_missing_says_what_to_install(varied_path):
    with pytest.raises(ModelError, match=r"No model could be loaded from .*(gptq|optimum|GPTQ)"):
        load_model(
            varied_path,
            "float32",
            model_kwargs={"quantization_config": {"quant_method": "gptq", "bits": 4}},
        )
