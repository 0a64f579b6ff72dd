"""What errors cost, against the model's own forward over KV that was changed by hand."""

import pytest
import torch
from transformers import DynamicCache

from ragfuse.engine.model_records import made_tables
from ragfuse.hf.rounding_error import rounding_costs
from ragfuse.types.kv import ChunkKV, LayerKV
from tests.kits import hf as kit
from tests.kits.families import FAMILIES, all_when_slow
from tests.kits.hf import family

BEFORE, FOLLOW = [5, 6, 7, 8, 9, 10, 11, 12], [40, 3, 77, 21]


def halved(kv: ChunkKV) -> ChunkKV:
    return ChunkKV(tuple(LayerKV(layer.keys / 2, layer.values / 2) for layer in kv.layers))


def log_words(model, layers) -> torch.Tensor:
    """What the model says along FOLLOW, its own cache filled by hand."""
    cache = DynamicCache()
    for at, layer in enumerate(layers):
        cache.update(layer.keys[None].clone(), layer.values[None].clone(), at)
    with torch.no_grad():
        out = model.model(
            input_ids=kit.tensor([FOLLOW[:-1]]), past_key_values=cache, use_cache=True
        )
    return torch.log_softmax(out.logits[0].double(), -1)


def by_hand(model, at: int, part: str) -> float:
    exact = model.encode(BEFORE).layers
    changed = list(exact)
    keys, values = exact[at].keys, exact[at].values
    changed[at] = LayerKV(keys / 2, values) if part == "keys" else LayerKV(keys, values / 2)
    wanted, found = log_words(model, exact), log_words(model, changed)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_every_layers_keys_and_values_cost_what_they_do_alone(name):
    model = family(name)
    found = rounding_costs(model, BEFORE, FOLLOW, halved)
    assert len(found) == model.n_layers
    for at, (keys, values) in enumerate(found):
        assert keys == pytest.approx(by_hand(model, at, "keys"), rel=1e-2, abs=1e-9)
        assert values == pytest.approx(by_hand(model, at, "values"), rel=1e-2, abs=1e-9)
        assert values > 0


def test_unchanged_kv_costs_nothing_and_nan_or_no_words_give_no_costs():
    model = family("llama")

    def lost(kv: ChunkKV) -> ChunkKV:
        return ChunkKV(
            tuple(LayerKV(layer.keys, layer.values * float("nan")) for layer in kv.layers)
        )

    assert all(max(both) < 1e-9 for both in rounding_costs(model, BEFORE, FOLLOW, lambda kv: kv))
    assert rounding_costs(model, BEFORE, FOLLOW[:1], halved) == ()
    assert rounding_costs(model, BEFORE, FOLLOW, lost) == ()


@pytest.mark.parametrize("name", all_when_slow(sorted(FAMILIES)))
def test_every_family_gets_tables_by_what_errors_cost(name, monkeypatch):
    model = family(name)
    tables = made_tables(model)
    assert len(tables.layers) == model.n_layers
    monkeypatch.setattr("ragfuse.engine.model_records.rounding_costs", lambda *_: ())
    assert tables.digest != made_tables(model).digest
