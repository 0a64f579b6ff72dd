"""An adapter changes nothing at first, can be switched off, and is saved."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ragfuse.hf.lora import LoraAdapter


def model_at(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def filled(adapter: LoraAdapter, seed: int = 2) -> LoraAdapter:
    """The adapter with random weights, as one that has learnt."""
    generator = torch.Generator().manual_seed(seed)
    for weight in adapter.weights.values():
        weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return adapter


def ids() -> torch.Tensor:
    return torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))


def test_a_new_adapter_and_one_that_is_off_change_nothing(tiny_path):
    model = model_at(tiny_path)
    with torch.no_grad():
        wanted = model(ids()).logits
        adapter = LoraAdapter(model, 4, 0, "tiny")
        torch.testing.assert_close(model(ids()).logits, wanted)
        filled(adapter)
        assert not torch.allclose(model(ids()).logits, wanted, atol=1e-2)
        with adapter.off():
            torch.testing.assert_close(model(ids()).logits, wanted, rtol=0, atol=0)
        assert not torch.allclose(model(ids()).logits, wanted, atol=1e-2)
    assert all(weight.requires_grad for weight in adapter.weights.values())
