"""The lean layers compute what transformers' and peft's own do, forwards and backwards."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from training.lean import Adapted, lean
from training.train import LINEAR


def test_an_adapted_layer_is_the_sum_of_both() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 6, dtype=torch.double, requires_grad=True), torch.randn(5, 6, dtype=torch.double)
    a, b = (torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((3, 6), (5, 3)))
    found, wanted = Adapted.apply(x, weight, a, b, 2.0), x @ (weight + 2.0 * b @ a).T
    torch.testing.assert_close(found, wanted)
    back = torch.randn_like(wanted)
    mine = torch.autograd.grad(found, (x, a, b), back)
    theirs = torch.autograd.grad(wanted, (x, a, b), back)
    torch.testing.assert_close([part.double() for part in mine], list(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_whole_model_learns_the_same(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    gradients = []
    for change in (lambda model: None, lean):
        torch.manual_seed(1)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32),
            LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, init_lora_weights=False),
        )
        change(model)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: w.grad for name, w in model.named_parameters() if w.grad is not None})
    plain, changed = gradients
    assert plain.keys() == changed.keys()
    assert len(plain) >= 2 * len(LINEAR)
    for name, wanted in plain.items():
        torch.testing.assert_close(changed[name], wanted, rtol=1e-3, atol=1e-5, msg=name)
