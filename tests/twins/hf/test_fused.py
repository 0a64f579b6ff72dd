"""A fused prefill, step for step the same as its slow twin, at any ratio, policy and layout of the
prompt.
"""

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragfuse.fuse.fusor import LostRun
from ragfuse.hf.model import KVSource
from ragfuse.hf.probe import decoder_layers
from ragfuse.types.kv import Layer
from tests.kits import hf as kit
from tests.kits.hf import Scene
from tests.twins import reference

POLICIES = list(reference.POLICIES)


def agrees_with_its_twin(
    scene: Scene, policy: str, ratio: float, accelerated: bool = False
) -> None:
    model = kit.family("llama", accelerated=accelerated)
    kv = kit.source(model, scene)
    fused = kit.fuse(model, scene, policy, ratio, kv)
    runs = [
        reference.Cached(run.lo, run.hi, kv.chunks[run.segment], run.shift, run.blend)
        for run in scene.runs
    ]
    twin = reference.LlamaTwin(model.model, model.tokenizer.convert_ids_to_tokens)
    wanted = twin.fuse(
        scene.token_ids, scene.positions.tolist(), runs, policy if ratio else "none", ratio
    )
    assert kit.off(fused.logits, wanted.logits) < kit.EXACT
    assert (
        kit.worst(kit.states(fused), list(zip(wanted.keys, wanted.values, strict=True))) < kit.EXACT
    )


@pytest.mark.parametrize("accelerated", [False, True], ids=["CPU's path", "accelerator's path"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_agrees_with_its_twin(policy, ratio, accelerated):
    agrees_with_its_twin(kit.usual(seed=4), policy, ratio, accelerated)


class Dispatched(TorchDispatchMode):
    """Names and shapes of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[object]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [
            list(each.shape) if isinstance(each, torch.Tensor) else each
            for each in tree_leaves((args, kwargs))
        ]
        self.calls.append((func.overloadpacket.__name__, given))
        return func(*args, **(kwargs or {}))


def dispatched_in_layers(
    policy: str, sizes: list[int], seed: int
) -> list[tuple[str, list[object]]]:
    """What the layers dispatch while an accelerator fuses a prompt."""
    model, scene = (
        kit.family("llama", accelerated=True),
        kit.scene(sizes, ["prefix", "chunk", "chunk", "fresh"], seed=seed),
    )
    kv, found = kit.source(model, scene), Dispatched()

    def recorded(forward):
        def run(*args, **kwargs):
            with found:
                return forward(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for layer in decoder_layers(model.model):
            patch.setattr(layer, "forward", recorded(layer.forward))
        kit.fuse(model, scene, policy, 0.3, kv)
    return found.calls


@pytest.mark.parametrize("policy", ["none", "lexical", "query", "hkvd"])
def test_layers_of_an_accelerator_can_be_captured(policy):
    """Prompts of one bucket dispatch the same operations on the same shapes, and no layer reads a
    value back.
    """
    calls = dispatched_in_layers(policy, [5, 40, 41, 12], seed=1)
    assert calls == dispatched_in_layers(policy, [7, 38, 43, 11], seed=2)
    assert len(calls) > 100
    assert not {name for name, _ in calls} & {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
    }
    assert calls != dispatched_in_layers(policy, [7, 38, 73, 11], seed=2)


@pytest.mark.parametrize("policy", ["hkvd", "query"])
def test_positions_may_have_gaps_and_budgets_fill_tiles(policy):
    kinds = ["prefix", "chunk", "chunk", "fresh"]
    agrees_with_its_twin(kit.scene([5, 12, 14, 6], kinds, gaps=[0, 3, 50, 9]), policy, 0.3)
    agrees_with_its_twin(kit.scene([3, 70, 80, 5], kinds), policy, 0.5)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["prefix", "chunk", "miss", "fresh"])),
        min_size=1,
    ),
    gaps=st.lists(st.integers(0, 5), min_size=12, max_size=12),
    policy=st.sampled_from(["hkvd", "lego", "lexical", "none", "full"]),
    ratio=st.floats(0, 1),
    seed=st.integers(0, 5),
    accelerated=st.booleans(),
)
def test_any_prompt_agrees_with_its_twin(parts, gaps, policy, ratio, seed, accelerated):
    """Misses, prefixes and chunks in any order, the last part cached too. A chunk that stands first
    has nothing to deviate from, so its rows may be ranked either way: it stands as a prefix.
    """
    parts = parts[:8]
    first = next((index for index, (_, kind) in enumerate(parts) if kind == "chunk"), None)
    kinds = ["prefix" if index == first == 0 else kind for index, (_, kind) in enumerate(parts)]
    agrees_with_its_twin(
        kit.scene([size for size, _ in parts], kinds, gaps[: len(parts)], seed),
        policy,
        ratio,
        accelerated,
    )


families = pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral-window",
        "gpt-oss-sinks-window",
        "falcon-alibi",
        "stablelm-partial",
        "deepseek-latent",
    ],
)


@families
@pytest.mark.parametrize(
    "kinds", ["cmcf", "mccf", "ccmf", "mmcf", "mcmf", "mmmf", "pmcc", "pccc", "fcfc", "c"]
)
def test_misses_in_any_pattern_equal_reuse_by_hand(name, kinds):
    words = {"c": "chunk", "m": "miss", "f": "fresh", "p": "prefix"}
    scene = kit.scene([13, 19, 11, 8][: len(kinds)], [words[kind] for kind in kinds])
    model = kit.family(name)
    kit.assert_reuse(kit.fuse(model, scene, "none", 0.0), model, scene)
    full = model.full_prefill(scene.token_ids)
    assert kit.off(kit.fuse(model, scene, "full", 1.0).logits, full.logits) < kit.EXACT


@families
def test_one_chunk_may_stand_twice_and_in_any_order(name):
    model = kit.family(name)
    a, b, question = (tuple(kit.ids(count, seed)) for count, seed in ((14, 1), (21, 2), (6, 3)))
    for order in ([a, b, a], [b, a], [a, a, a], [b, b, a, b]):
        parts = (*((part, "chunk") for part in order), (question, "fresh"))
        scene = Scene(parts, (0, *accumulate(map(len, order))))
        kit.assert_reuse(kit.fuse(model, scene, "none", 0.0), model, scene)
        full = kit.fuse(model, scene, "hkvd", 1.0)
        assert kit.off(full.logits, model.full_prefill(scene.token_ids).logits) < kit.EXACT


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("policy", ["hkvd", "query"])
def test_a_run_lost_on_the_way_is_named_and_nothing_stays_behind(layer, policy):
    model, scene = kit.family("llama"), kit.usual()
    kv = kit.source(model, scene)

    class Losing(KVSource):
        def __iter__(self) -> Iterator[list[Layer]]:
            for layers in super().__iter__():
                yield [
                    {**each, 2: each[2] if at < layer else None} for at, each in enumerate(layers)
                ]

    with pytest.raises(LostRun) as caught:
        kit.fuse(model, scene, policy, 0.3, Losing(kv.chunks))
    assert caught.value.segment == 2
    again = kit.fuse(model, scene, policy, 1.0, kv)
    assert kit.off(again.logits, model.full_prefill(scene.token_ids).logits) < kit.EXACT
