"""What reading in a thread costs the model: what is left once all that hides is taken away, by real reads of files."""

import time
from dataclasses import replace

import pytest

from ragfuse.fuse.select import cost_of
from ragfuse.hf.model import KVSource
from ragfuse.measure.passes import at_hand, reading_s
from ragfuse.measure.read_cost import MAX_DELAY_S, held_up_s, unexplained_s
from ragfuse.plan.estimate import Blend, Estimate
from ragfuse.types.profiles import HELD_UP_S
from tests.plan.kit import LAYERS, machine
from tests.plan.test_estimate import fetch
from tests.store.kit import kv, same

CHUNKS = [kv(seed, n=4, n_layers=LAYERS) for seed in range(6)]


def test_what_hides_behind_fusing_is_not_counted():
    assert unexplained_s(1.0 + 0.1 / 12, 1.0, 0.1, 12) == pytest.approx(0.0)  # the first layer hides behind nothing
    assert unexplained_s(1.3, 1.0, 0.0, 12) == pytest.approx(0.3)
    assert unexplained_s(2.0 + 1.0 / 12, 1.0, 2.0, 12) == pytest.approx(0.0)  # all wait for reading


def fusing(slower_s: float):
    """Takes every layer, and so much longer for each where they are not at hand."""

    def fuse(source) -> float:
        began = time.perf_counter()
        for layer in range(LAYERS):
            found = source.read(layer)
            assert all(same(found[at], chunk.layers[layer]) for at, chunk in enumerate(CHUNKS))
            time.sleep(0.002 + (0.0 if isinstance(source, KVSource) else slower_s))
        return time.perf_counter() - began

    return fuse


def test_fusing_that_is_slower_beside_reads_is_noticed_and_within_bounds(tmp_path):
    source = KVSource(CHUNKS)
    assert 0 <= held_up_s(fusing(0.0), source, CHUNKS, tmp_path, 3) <= MAX_DELAY_S
    assert held_up_s(fusing(0.006), source, CHUNKS, tmp_path, 3) >= 0.5e-3
    assert held_up_s(fusing(0.1), source, CHUNKS, None, 1) == MAX_DELAY_S
    assert list(tmp_path.iterdir()) == []


def test_a_model_s_own_is_measured_and_leaves_nothing_behind(engine, tmp_path):
    folder = tmp_path / "place"
    folder.mkdir()
    assert 0 <= reading_s(engine.model, 96, 1, folder, lambda *_: None) <= MAX_DELAY_S
    assert list(folder.iterdir()) == []


def test_kv_at_hand_is_what_a_store_gives_back_in_the_host_s_memory():
    found = at_hand(CHUNKS[0])
    assert all(same(layer, given) for layer, given in zip(found.layers, CHUNKS[0].layers, strict=True))
    assert {layer.keys.device.type for layer in found.layers} == {"cpu"}
    assert found.layers[0].keys.data_ptr() != CHUNKS[0].layers[0].keys.data_ptr()


def test_plans_count_what_was_measured():
    blend, fetches = Blend(cost_of("lego"), 1000, 50, 500, 0.2), [fetch("disk", segment=at) for at in range(6)]
    assert machine().held_up_s == HELD_UP_S
    free, held = (Estimate(replace(machine(), held_up_s=each)).ttft_s(blend, fetches) for each in (0.0, 1e-3))
    reads = len(fetches) * len(Estimate(machine()).steps_s(fetches))
    assert held - free == pytest.approx(1e-3 * reads, rel=0.05)
