"""Sizes of queries, against those that the model's own projections give."""

import pytest
import torch

from ragfuse.hf.rounding_error import query_sizes
from tests.kits import hf as kit
from tests.kits.families import FAMILIES

RUNS = ([5, 6, 7, 8, 9, 10, 11], [40, 3, 77])


def projected(model, runs) -> list[torch.Tensor]:
    """Sums over tokens of squared outputs of q_proj, [Hq * D] a layer: rotation, which is later,
    keeps a pair's.
    """
    outputs = [[] for _ in range(model.n_layers)]
    for layer, found in zip(model.model.model.layers, outputs, strict=True):
        add = lambda module, args, out, found=found: found.append(out[0].double())  # noqa: E731
        layer.self_attn.q_proj.register_forward_hook(add)
    for run in runs:
        with torch.no_grad():
            model.model(input_ids=kit.tensor([run]))
    return [torch.cat(found).square().sum(0) for found in outputs]


@pytest.mark.parametrize("name", ["llama", "qwen2", "llama-one-kv-head"])
def test_sizes_are_what_the_projections_give_head_by_head(name):
    model = kit.HFModel(kit.build(*FAMILIES[name]), kit.tokenizer())
    before = model.model.config._attn_implementation
    found, wanted = query_sizes(model, RUNS), projected(model, RUNS)
    assert model.model.config._attn_implementation == before
    assert len(found) == model.n_layers
    for size, power in zip(found, wanted, strict=True):
        heads, dim = size.shape
        by_head = power.view(heads, -1, dim).mean(1) / sum(map(len, RUNS))
        pairs = by_head.view(heads, 2, dim // 2).sum(1)
        assert torch.allclose(
            size.double().square().view(heads, 2, dim // 2).sum(1).cpu(), pairs.cpu(), rtol=1e-4
        )
