"""The compiled steps compute what transformers' own do, forwards and backwards."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from ragfuse.hf.chunk_adapter import LoraAdapter
from training.lean import lean


@pytest.mark.slow
def test_a_whole_model_learns_the_same(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    gradients = []
    for change in (lambda model: None, lean):
        model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
        adapter = LoraAdapter(model, 4, 1, "tiny")
        generator = torch.Generator().manual_seed(2)
        for weight in adapter.weights.values():
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        change(model)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: weight.grad for name, weight in adapter.weights.items()})
    plain, changed = gradients
    for name, wanted in plain.items():
        torch.testing.assert_close(changed[name], wanted, rtol=1e-3, atol=1e-5, msg=name)
