"""16-bit weights: the same promises within their rounding; routers that send a token elsewhere are no refusal."""

import pytest
import torch

from ragfuse.hf.handover import generate
from ragfuse.hf.probe import typical
from tests import reference
from tests.hf import kit

BOUNDS = {torch.bfloat16: 6e-2, torch.float16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", BOUNDS)
families = pytest.mark.parametrize(
    "name",
    ["llama", "gpt-oss-sinks-window", "gemma2-softcap-window", "falcon-alibi", "glm-interleaved", "mistral-window"],
)


@dtypes
@families
def test_both_ends_are_right_within_rounding(name: str, dtype: torch.dtype) -> None:
    model, scene = kit.family(name, dtype), kit.usual()
    assert model.profile.refusal == ""
    kv, full = kit.source(model, scene), model.full_prefill(scene.token_ids)
    fused = kit.fuse(model, scene, "hkvd", 1.0, kv)
    assert fused.logits.dtype == kit.states(fused)[0][0].dtype == dtype
    assert kit.off(fused.logits, full.logits) < BOUNDS[dtype]
    assert kit.worst(kit.states(fused), kit.states(full)) < BOUNDS[dtype]
    fused = kit.fuse(model, scene, "none", 0.0, kv)
    logits, states = reference.prefill_by_hand(model.model, scene.by_hand, scene.positions.tolist())
    assert kit.off(fused.logits, logits) < BOUNDS[dtype]
    assert kit.worst(kit.states(fused), states) < BOUNDS[dtype]


@dtypes
def test_an_answer_is_written_in_low_precision(dtype: torch.dtype) -> None:
    model, scene = kit.family("llama", dtype), kit.usual()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = kit.tensor([scene.token_ids])
    wanted = model.model.generate(ids, **options)[0, ids.shape[1] :].tolist()
    assert generate(model, model.full_prefill(scene.token_ids), options) == [wanted]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("phimoe", torch.bfloat16),
        ("olmoe", torch.bfloat16),
        ("deepseek-latent", torch.bfloat16),
        ("jetmoe", torch.bfloat16),
        ("jetmoe", torch.float16),
    ],
)
def test_experts_are_not_refused_for_a_token_that_went_elsewhere(name: str, dtype: torch.dtype) -> None:
    model, scene = kit.family(name, dtype), kit.usual()
    assert model.profile.refusal == ""
    fused, full = kit.fuse(model, scene, "hkvd", 1.0), model.full_prefill(scene.token_ids)
    pairs = zip(kit.states(fused), kit.states(full), strict=True)
    assert max(typical(a, b) for mine, own in pairs for a, b in zip(mine, own, strict=True)) < BOUNDS[dtype]
