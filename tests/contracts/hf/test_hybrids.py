"""Models with a state beside KV, or latent KV: fused exactly, or answered by full prefill with the
reason.
"""

import pytest
import torch

from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel
from ragfuse.hf.probe import is_whole
from ragfuse.hf.verify import verify
from tests.kits import hf as kit
from tests.kits.families import HYBRIDS, MLA


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_is_answered_by_full_prefill_with_the_reason(name):
    kind, options, reason, _ = HYBRIDS[name]
    model = HFModel(kit.build(kind, options), kit.tokenizer())
    assert reason in model.profile.refusal
    assert not verify(model).passed
    ids = kit.ids(40)
    answer = generate(model, model.full_prefill(ids), kit.greedy(8))
    assert answer == kit.theirs(model, ids, kit.greedy(8))


def test_a_layer_with_kv_and_a_state_is_not_taken_for_kv_alone():
    """All its keys are there, and dropping the state beside them would change the answer."""
    kind, options = HYBRIDS["falcon-h1-both-in-a-layer"][:2]
    model, ids = kit.build(kind, options), kit.tensor([kit.ids(12)])
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        plain = kit.build("llama", {})(input_ids=ids, use_cache=True).past_key_values
    assert all(layer.keys.shape[2] == 12 for layer in cache.layers)
    assert not is_whole(cache, 4, 12)
    assert is_whole(plain, 4, 12)


def test_latent_attention_with_experts_passes_verify():
    model = HFModel(kit.build("deepseek_v2", MLA), kit.tokenizer())
    verdict = verify(model)
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
