"""Several threads on one model at once get what each would get alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel
from tests.hf import kit

GREEDY = kit.greedy(5)
SAMPLED = {**GREEDY, "do_sample": True}


def work(model: HFModel, seed: int) -> tuple[object, ...]:
    """Encode, fuse and answer; the job differs by seed."""
    scene = kit.usual(seed)
    kv = kit.source(model, scene)
    policy, ratio = [
        ("hkvd", 0.3),
        ("none", 0.0),
        ("query-gradual", 0.2),
        ("lexical", 0.5),
        ("hkvd", 1.0),
    ][seed % 5]
    greedy = generate(model, kit.fuse(model, scene, policy, ratio, kv), GREEDY)
    full = generate(model, model.full_prefill(scene.token_ids), GREEDY)
    sampled = generate(model, kit.fuse(model, scene, policy, ratio, kv), SAMPLED, seed=seed)
    return greedy, full, sampled, [layer.keys.sum().item() for layer in kv.chunks[1].layers]


@pytest.mark.parametrize("name", ["llama", "falcon-alibi"])
def test_threads_get_what_each_would_get_alone(name):
    model = kit.family(name)
    alone = [work(model, seed) for seed in range(6)]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda seed: work(model, seed), range(6)))
    assert together == alone
