"""A run is encoded at positions with gaps, and a prompt over such runs is what its own prefill
there would be.
"""

import pytest
import torch

from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.handover import generate
from ragfuse.hf.model import KVSource
from tests.kits import hf as kit

ROTATED = [
    "llama",
    "gemma3-two-ropes",
    "glm-interleaved",
    "smollm3-some-nope",
    "deepseek-latent",
    "gpt-neox-partial",
]
UNMARKED = ["bloom-alibi", "falcon-alibi", "mpt-alibi"]
FIXED = ["gpt2", "opt", "gpt-bigcode", "xglm", "gptj", "codegen", "hunyuan"]
GAPPED = [*range(9), *range(20, 33), *range(40, 44)]
options = kit.greedy(8)


def at(start: int) -> list[int]:
    return [start + position for position in GAPPED]


def own(name: str, ids: list[int], positions: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The KV of the family's own forward at these positions."""
    model = kit.family(name).model
    with torch.no_grad():
        out = model(
            input_ids=kit.tensor([ids]), position_ids=kit.tensor([positions]), use_cache=True
        )
    return [(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers]


@pytest.mark.parametrize("name", UNMARKED)
def test_biases_count_keys_so_that_gaps_are_closed(name):
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    plain = model.full_prefill(ids)
    assert kit.apart(model.encode_at(ids, at(7)), model.encode(ids)) < kit.EXACT
    full = model.full_prefill(ids, torch.tensor(at(7)))
    assert kit.off(full.logits, plain.logits) < kit.EXACT
    assert generate(model, full, options) == generate(model, plain, options)


@pytest.mark.parametrize(
    "name", [name for name in (*ROTATED, *UNMARKED) if name != "gemma3-two-ropes"]
)
def test_a_continuation_is_scored_behind_the_last_position(name):
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    follow = model.score_continuation(model.full_prefill(ids, torch.tensor(at(3))), [5, 9, 2])
    whole = model.full_prefill([*ids, 5, 9], torch.tensor([*at(3), 47, 48]))
    assert kit.off(follow[-1], whole.logits) < kit.EXACT


@pytest.mark.parametrize("name", [*ROTATED, *FIXED])
def test_a_run_with_gaps_equals_the_models_own_forward_there(name):
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    encoded = model.encode_at(ids, at(7))
    windowed = any(window is not None for window in model.profile.windows)
    assert windowed or kit.worst(kit.states(encoded), own(name, ids, at(7))) < kit.EXACT
    assert kit.apart(encoded, model.encode_at(ids, range(7, 7 + len(ids)))) > 1e-4
    for layer in encoded.layers:
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


@pytest.mark.parametrize("name", [*ROTATED, *UNMARKED, *FIXED])
def test_a_prompt_from_one_run_with_gaps_equals_its_full_prefill(name):
    """Encoded from 0 on and turned to where it stands; where nothing can be turned, encoded
    there.
    """
    model, ids, start = kit.family(name), kit.ids(len(GAPPED) + 3), 11
    positions = torch.tensor([*at(start), 60, 61, 62])
    n_run = len(GAPPED)
    kv = model.encode_at(ids[:n_run], at(start if model.profile.fixed else 0))
    turn = 0 if model.profile.fixed else start
    fused = model.fuse(
        ids, positions, [CachedRun(0, 0, n_run, turn, blend=False)], KVSource([kv]), "none", 0.0
    )
    full = model.full_prefill(ids, positions)
    kit.assert_same(fused, full)
    assert generate(model, fused, options) == generate(model, full, options)
