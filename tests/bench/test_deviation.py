"""The two deviations, beside the model's own full attention and a loop written out."""

from pathlib import Path

import pytest
import torch
from ragfuse_bench.deviation import attention_deviation, attention_of, kv_deviation

from ragfuse.hf.model import HFModel
from ragfuse.models.loader import load_model
from ragfuse.types.kv import ChunkKV, LayerKV


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return load_model(varied_path, "float32")


def test_kv_deviation_is_each_token_s_distance() -> None:
    torch.manual_seed(0)
    one, two = (
        ChunkKV(tuple(LayerKV(torch.randn(2, 5, 4), torch.randn(2, 5, 4)) for _ in range(3)))
        for _ in range(2)
    )
    found = kv_deviation(one, two)
    assert found.shape == (3, 5)
    for layer in range(3):
        for token in range(5):
            a, b = one.layers[layer], two.layers[layer]
            keys, values = (
                a.keys[:, token] - b.keys[:, token],
                a.values[:, token] - b.values[:, token],
            )
            assert float(found[layer, token]) == pytest.approx(
                float(torch.cat([keys, values]).norm()), rel=1e-5
            )
    assert not kv_deviation(one, one).any()


def test_attention_of_the_last_rows_is_the_model_s_own(model: HFModel) -> None:
    ids = model.tokens("a lighthouse keeper counted ships all night long")
    found = attention_of(model, model.full_prefill(ids), 6)
    model.model.set_attn_implementation("eager")
    whole = model.model(torch.tensor([ids]), output_attentions=True).attentions
    model.model.set_attn_implementation("sdpa")
    assert len(found) == model.n_layers
    for mine, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, theirs[0, :, -6:], rtol=1e-4, atol=1e-5)
    assert float(attention_deviation(found, found).max()) == 0.0
