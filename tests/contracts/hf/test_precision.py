"""16-bit weights: the same promises within their rounding; routers that send a token elsewhere are
no refusal.
"""

import pytest
import torch

from ragfuse.hf.model import HFModel
from ragfuse.hf.probe import typical
from tests.kits import hf as kit
from tests.twins import reference

BOUNDS = {torch.bfloat16: 6e-2, torch.float16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", BOUNDS)
families = pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt-oss-sinks-window",
        "gemma2-softcap-window",
        "falcon-alibi",
        "glm-interleaved",
        "mistral-window",
        "smollm3-some-nope",
    ],
)


@dtypes
@families
def test_both_ends_are_right_within_rounding(name, dtype):
    model, scene = kit.family(name, dtype), kit.usual()
    assert model.profile.refusal == ""
    kv, full = kit.source(model, scene), model.full_prefill(scene.token_ids)
    fused = kit.fuse(model, scene, "hkvd", 1.0, kv)
    assert fused.logits.dtype == kit.states(fused)[0][0].dtype == dtype
    kit.assert_same(fused, full, BOUNDS[dtype])
    kit.assert_reuse(kit.fuse(model, scene, "none", 0.0, kv), model, scene, BOUNDS[dtype])


def test_keys_that_are_mostly_a_constant_bias_are_moved_all_the_same():
    dtype = torch.bfloat16
    built = kit.build(
        "qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, dtype=dtype
    )
    with torch.no_grad():
        for layer in built.model.layers[1::2]:
            bias = layer.self_attn.k_proj.bias.view(2, -1)
            bias[:, bias.shape[1] // 2 - 1] = 40.0  # of the pair that turns slowest
    model, scene = HFModel(built, kit.tokenizer()), kit.usual()
    assert all(layout is not None for layout in model.profile.rope)
    fused = kit.fuse(model, scene, "none", 0.0)
    logits, states = reference.prefill_by_hand(model.model, scene.by_hand, scene.positions.tolist())
    assert kit.off(fused.logits, logits) < BOUNDS[dtype]
    for (mine, _), (own, _) in zip(kit.states(fused), states, strict=True):
        assert kit.off(mine[..., :-1], own[..., :-1]) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("phimoe", "olmoe", "deepseek-latent", "jetmoe")),
        ("jetmoe", torch.float16),
    ],
)
def test_experts_are_not_refused_for_a_token_that_went_elsewhere(name, dtype):
    model, scene = kit.family(name, dtype), kit.usual()
    assert model.profile.refusal == ""
    fused, full = kit.fuse(model, scene, "hkvd", 1.0), model.full_prefill(scene.token_ids)
    pairs = zip(kit.states(fused), kit.states(full), strict=True)
    assert (
        max(typical(a, b) for mine, own in pairs for a, b in zip(mine, own, strict=True))
        < BOUNDS[dtype]
    )
