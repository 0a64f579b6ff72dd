"""An adapter computes what PEFT's own layers do, can be switched off, and is saved as PEFT reads it."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from ragfuse.hf.lora import AdaptedProduct, LoraAdapter


def model_at(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def filled(adapter: LoraAdapter, seed: int = 2) -> LoraAdapter:
    """The adapter with random weights, as one that has learnt."""
    generator = torch.Generator().manual_seed(seed)
    adapter.load({name: 0.1 * torch.randn(w.shape, generator=generator) for name, w in adapter.weights.items()})
    return adapter


def ids() -> torch.Tensor:
    return torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))


def test_an_adapted_layer_is_the_sum_of_both() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 6, dtype=torch.double, requires_grad=True), torch.randn(5, 6, dtype=torch.double)
    a, b = (torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((3, 6), (5, 3)))
    found, wanted = AdaptedProduct.apply(x, weight, a, b, 2.0), x @ (weight + 2.0 * b @ a).T
    torch.testing.assert_close(found, wanted)
    back = torch.randn_like(wanted)
    mine = torch.autograd.grad(found, (x, a, b), back)
    theirs = torch.autograd.grad(wanted, (x, a, b), back)
    torch.testing.assert_close([part.double() for part in mine], list(theirs), rtol=1e-6, atol=1e-6)


def test_a_new_adapter_changes_nothing_and_one_that_is_off_neither(tiny_path: Path) -> None:
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


def test_gradients_are_those_of_peft(tiny_path: Path) -> None:
    model = model_at(tiny_path)
    adapter = filled(LoraAdapter(model, 4, 0, "tiny"))
    model(input_ids=ids(), labels=ids()).loss.backward()
    plain = get_peft_model(
        model_at(tiny_path), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    theirs = {name: weight for name, weight in plain.named_parameters() if weight.requires_grad}
    assert theirs.keys() == adapter.weights.keys()
    for name, weight in theirs.items():
        weight.data.copy_(adapter.weights[name].data)
    plain(input_ids=ids(), labels=ids()).loss.backward()
    for name, weight in theirs.items():
        torch.testing.assert_close(adapter.weights[name].grad, weight.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_first_weights_come_of_the_seed_alone(tiny_path: Path) -> None:
    torch.manual_seed(5)
    one = LoraAdapter(model_at(tiny_path), 4, 0, "tiny").weights
    torch.rand(7)
    same, other = (LoraAdapter(model_at(tiny_path), 4, seed, "tiny").weights for seed in (0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_saved_peft_reads_and_another_adapter_too(tiny_path: Path, tmp_path: Path) -> None:
    model = model_at(tiny_path)
    adapter = filled(LoraAdapter(model, 4, 0, str(tiny_path)))
    adapter.save(tmp_path)
    with torch.no_grad():
        wanted = model(ids()).logits
        merged = PeftModel.from_pretrained(model_at(tiny_path), tmp_path).merge_and_unload()
        torch.testing.assert_close(merged(ids()).logits, wanted, rtol=1e-4, atol=1e-4)
        fresh = model_at(tiny_path)
        LoraAdapter(fresh, 4, 7, str(tiny_path)).read(tmp_path)
        torch.testing.assert_close(fresh(ids()).logits, wanted, rtol=0, atol=0)
