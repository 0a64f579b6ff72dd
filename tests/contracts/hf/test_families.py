"""Tiny random models of many families: what is fused is exact, what cannot be fused is refused and
still answered.
"""

import pytest
import torch
from pydantic import TypeAdapter

from ragfuse.errors import RefusedError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.handover import generate
from tests.kits import hf as kit
from tests.kits.families import FAMILIES, REFUSED, all_when_slow

families = pytest.mark.parametrize("name", FAMILIES)
some = pytest.mark.parametrize("name", all_when_slow(FAMILIES))
both_paths = pytest.mark.parametrize(
    "accelerated", [False, True], ids=["CPU's path", "accelerator's path"]
)
CHECKING = "hkvd"


@both_paths
@some
def test_ratio_one_equals_full_prefill(name, accelerated):
    model, scene = kit.family(name, accelerated=accelerated), kit.usual()
    assert model.profile.refusal == ""
    fused = kit.fuse(model, scene, CHECKING, 1.0)
    kit.assert_same(fused, model.full_prefill(scene.token_ids))
    assert fused.mean_ratio == 1.0


@both_paths
@families
def test_ratio_zero_equals_reuse_placed_by_hand(name, accelerated):
    model, scene = kit.family(name, accelerated=accelerated), kit.usual()
    fused = kit.fuse(model, scene, CHECKING, 0.0)
    kit.assert_reuse(fused, model, scene)
    assert kit.off(fused.logits, model.full_prefill(scene.token_ids).logits) > 1e-3
    assert fused.mean_ratio == 0.0


@families
def test_a_later_token_never_changes_an_earlier_row(name):
    model, scene = kit.family(name), kit.usual()
    row = 40
    other = list(scene.token_ids)
    other[row] = 3 + (other[row] + 50) % 200
    runs = [run for run in scene.runs if run.hi <= row]
    for ratio in (0.0, 1.0):
        kv = kit.source(model, scene)
        one, two = (
            model.fuse(tokens, scene.positions, runs, kv, CHECKING, ratio)
            for tokens in (scene.token_ids, other)
        )
        early = [tuple(part[:, :row] for part in layer) for layer in kit.states(one)]
        late = [tuple(part[:, :row] for part in layer) for layer in kit.states(two)]
        assert kit.worst(early, late) < 1e-6
        assert kit.off(one.logits, two.logits) > 1e-4


@some
def test_the_answer_goes_on_as_after_the_models_own_prefill(name):
    model, scene = kit.family(name), kit.usual()
    options = kit.greedy(16)
    wanted = kit.theirs(model, scene.token_ids, options)
    assert generate(model, kit.fuse(model, scene, CHECKING, 1.0), options) == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved_is_refused_with_the_reason_and_still_answers_right(name):
    model, tokens, options = kit.family(name), kit.ids(40), kit.greedy(12)
    reason, runs = REFUSED[name][2], [CachedRun(0, 0, 20, 0, blend=True)]
    assert reason in model.profile.refusal
    assert model.profile.fixed == (reason in ("the hidden states", "rotation"))
    with pytest.raises(RefusedError):
        model.fuse(tokens, torch.arange(40), runs, kit.KVSource([]), CHECKING, 0.5)
    wanted, prefill = kit.theirs(model, tokens, options), model.full_prefill(tokens)
    assert int(prefill.logits.argmax()) == wanted[0]
    assert generate(model, prefill, options) == wanted


def test_the_probe_looks_at_the_weights_and_not_at_the_name():
    """Queries and keys that are normalised after their rotation can be moved only if the norm
    scales all dims alike.
    """
    model = kit.build(*REFUSED["hunyuan"][:2])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "key_layernorm" in name or "query_layernorm" in name:
                weight.fill_(1.0)
    assert kit.HFModel(model).profile.refusal == ""
    assert "rotation" in kit.family("hunyuan").profile.refusal


def test_a_deep_model_in_bfloat16_is_not_refused_for_its_rounding():
    """What rounds differs between two positions by more than 6e-2 in the last layers; float32 finds
    the same layout.
    """
    options = {"num_hidden_layers": 160}
    deep, exact = (
        kit.HFModel(kit.build("llama", options, dtype=each))
        for each in (torch.bfloat16, torch.float32)
    )
    assert (deep.profile.refusal, deep.profile.mode) == ("", "rows")
    # their frequencies are rounded, too
    pairs = zip(deep.profile.rope, exact.profile.rope, strict=True)
    assert all((a.lo, a.pairing, a.part) == (b.lo, b.pairing, b.part) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama", {(0, 8, "half", "keys")}),
        ("gpt-neox-partial", {(0, 2, "half", "keys")}),
        ("glm-interleaved", {(0, 4, "interleaved", "keys")}),
        ("cohere2-some-nope-window", {(0, 8, "interleaved", "keys"), None}),
        ("smollm3-some-nope", {(0, 8, "half", "keys"), None}),
        ("deepseek-latent", {(0, 4, "half", "values"), (0, 4, "interleaved", "values")}),
        ("bloom-alibi", {None}),
    ],
)
def test_the_layout_is_found_per_layer(name, wanted):
    layouts = kit.family(name).profile.rope
    found = {
        (rope.lo, len(rope.inv_freq), rope.pairing, rope.part) if rope else None for rope in layouts
    }
    assert found <= wanted
    assert found
    assert (None in found) == (None in wanted)


def test_two_rotations_in_one_model_are_told_apart():
    assert len({rope.inv_freq for rope in kit.family("gemma3-two-ropes").profile.rope}) == 2


@pytest.mark.parametrize(
    "name", ["mistral-window", "qwen2-window", "gemma2-softcap-window", "gpt-oss-sinks-window"]
)
def test_windows_are_found_per_layer(name):
    windows = kit.family(name).profile.windows
    assert 20 in windows
    assert set(windows) <= {20, None}


def test_a_profile_survives_being_written():
    for name in FAMILIES:
        profile = kit.family(name).profile
        assert TypeAdapter(type(profile)).validate_python(profile.as_dict()) == profile
