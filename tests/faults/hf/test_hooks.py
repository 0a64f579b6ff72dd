"""A fused prefill leaves the model as it found it, whatever happens on the way."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.types.kv import Layer
from tests.kits import hf as kit


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
        def __iter__(self) -> Iterator[Sequence[Layer]]:
            for layers in super().__iter__():
                yield from ([each] for each in layers[:layer])
            raise Sudden

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
