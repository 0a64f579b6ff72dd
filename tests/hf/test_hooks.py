"""A fused prefill leaves the model as it found it, whatever happens on the way."""

from collections.abc import Callable, Mapping

import pytest
import torch
from ragfuse_bench.deviation import attention_of

from ragfuse.fuse.fusor import Buffers, Fusion, Places
from ragfuse.fuse.select import policy_named
from ragfuse.hf.handover import generate
from ragfuse.hf.hooks import FusedPrefill
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.types.kv import LayerKV
from ragfuse.types.policy_cost import watched_layers
from tests.hf import kit


def traces(model: HFModel) -> tuple[object, ...]:
    """What a prefill touches: hooks, the attention in use, an answer in place of the forward."""
    hooks = [
        len(module._forward_pre_hooks)
        + len(module._forward_hooks)
        + len(module._forward_pre_hooks_with_kwargs)
        for module in model.model.modules()
    ]
    return sum(hooks), model.model.config._attn_implementation, "forward" in model.model.__dict__


class Sudden(Exception):
    pass


def failing_at(model: HFModel, layer: int) -> Callable[..., None]:
    """Makes the MLP of a layer raise, once it is reached."""

    def raise_it(*_: object) -> None:
        raise Sudden

    return model.model.model.layers[layer].mlp.register_forward_pre_hook(raise_it).remove


families = pytest.mark.parametrize("name", ["llama", "gpt-oss-sinks-window", "stablelm-partial"])


@families
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_nothing_stays_behind_when_a_layer_or_the_store_raises(name, layer):
    model, scene = kit.family(name), kit.usual()
    kv, before = kit.source(model, scene), traces(model)
    full = model.full_prefill(scene.token_ids)
    stop = failing_at(model, layer)
    with pytest.raises(Sudden):
        kit.fuse(model, scene, "hkvd", 0.3, kv)
    stop()
    assert traces(model) == before
    assert torch.equal(model.full_prefill(scene.token_ids).logits, full.logits)
    assert kit.off(kit.fuse(model, scene, "hkvd", 1.0, kv).logits, full.logits) < 5e-6
    assert traces(model) == before

    class Broken(KVSource):
        def read(self, at: int) -> Mapping[int, LayerKV | None]:
            if at == layer:
                raise Sudden
            return super().read(at)

    with pytest.raises(Sudden):
        kit.fuse(model, scene, "hkvd", 0.3, Broken(kv.chunks))
    assert traces(model) == before
    assert not model.lock.is_mine


@pytest.mark.parametrize("layer", [0, 2])
def test_nothing_stays_behind_when_an_answer_breaks_off(layer):
    model, scene = kit.family("llama"), kit.usual()
    before = traces(model)
    prefill = kit.fuse(model, scene, "hkvd", 0.3)
    stop = failing_at(model, layer)
    with pytest.raises(Sudden):
        generate(model, prefill, kit.greedy(4))
    stop()
    assert traces(model) == before
    prefill = kit.fuse(model, scene, "hkvd", 0.3)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, prefill, kit.greedy(-1))
    assert traces(model) == before


def test_a_forward_of_somebody_else_stays_in_place():
    """Libraries that spread a model over devices put their own forward on it."""
    model = kit.HFModel(kit.build("llama", {}))
    calls, plain = [], model.model.forward

    def theirs(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return plain(*args, **kwargs)

    theirs.__wrapped__ = plain
    model.model.forward = theirs
    scene = kit.usual()
    generate(model, kit.fuse(model, scene, "hkvd", 0.3), kit.greedy(4))
    assert model.model.forward is theirs
    assert len(calls) >= 4


@families
def test_a_look_returns_the_question_s_attention_and_runs_no_later_layer(name):
    model, scene = kit.family(name), kit.usual()
    ids, profile = kit.tensor([list(scene.token_ids)]), model.profile
    n_tokens, before, watched = len(scene.token_ids), traces(model), watched_layers(model.n_layers)
    positions = torch.arange(n_tokens, device=ids.device)
    asking = torch.arange(n_tokens - 3, n_tokens)
    buffers = Buffers(n_tokens, (), KVSource(), profile.rope, model.device)
    places = Places.of((), n_tokens, model.device)
    reuse = Fusion(buffers, positions, places, policy_named("none"), 0.0)
    unwanted = failing_at(model, watched[-1]) if profile.mode == "rows" else lambda: None
    with torch.no_grad():
        found = FusedPrefill(model._wiring(profile), reuse).look(ids, asking)
    unwanted()
    assert traces(model) == before
    assert (found is None) == (profile.mode != "rows")
    whole = attention_of(model, model.full_prefill(scene.token_ids), ids.shape[1])
    rows = asking if watched[-1] < model.n_layers - 1 else asking[-1:]
    wanted = sum(whole[layer][:, rows].sum((0, 1)) for layer in watched)
    if found is not None and "sinks" not in name:  # sinks take a share that the look leaves out
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
