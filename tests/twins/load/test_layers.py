"""Layers of cached chunks, in memory and ahead from disk: in order, never hanging, no thread left
behind.
"""

import threading
from itertools import chain, islice

import pytest

from ragfuse.load.layers import LayerReader
from ragfuse.plan.cost import AHEAD, STEP_NBYTES
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier
from ragfuse.types.plan import Fetch, Forecast, LoadPlan
from ragfuse.types.prompt import Prompt, Segment
from tests.kits.redis_server import until
from tests.kits.store import key, kv, same

LAYERS = 3 * AHEAD
CHUNKS = tuple(kv(seed, n=3 + seed, n_layers=LAYERS) for seed in range(3))


@pytest.fixture
def store(tmp_path):
    with KVStore([MemoryTier(1 << 24, lru), DiskTier(tmp_path, 1 << 24, lru)]) as store:
        for number, chunk in enumerate(CHUNKS):
            assert store.put(key(number), chunk, wait=True)
        yield store


def plan(*tiers, a_read=1, before=0):
    """Chunks of which at most `a_read` layers fit into one read, and of which `before` layers
    should be read first.
    """
    nbytes = STEP_NBYTES * LAYERS // a_read
    fetches = [
        Fetch(2 * number, key(number), tier, "raw", nbytes) for number, tier in enumerate(tiers)
    ]
    segments = tuple(Segment((at,), at) for at in range(2 * len(tiers) + 1))
    forecast = Forecast(1.0, 1 - before / LAYERS, 1.0, 1.0)
    return LoadPlan(Prompt(segments), 0.0, "none", tuple(fetches), forecast=forecast)


def by_layer(reader):
    """The layers of a reader, one by one."""
    return chain.from_iterable(reader)


def loading():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("ragfuse-load") and thread.is_alive()
    ]


class Wrong(KVStore):
    """An open store that fails with `error` when one layer is read."""

    def __init__(self, store, layer, error):
        self.__dict__ = store.__dict__
        self.layer, self.error = layer, error

    def read_layers(self, key, first, count=1, tier=None, level=None):
        if self.layer in range(first, first + count):
            raise self.error
        return super().read_layers(key, first, count, tier, level)


@pytest.mark.parametrize("tiers", [("memory",) * 3, ("disk",) * 3, ("memory", "disk", "memory")])
@pytest.mark.parametrize("a_read", [1, 3, AHEAD + 1, LAYERS])
def test_every_layer_of_every_segment_comes_in_order(store, tiers, a_read):
    with LayerReader(store, plan(*tiers, a_read=a_read), LAYERS) as reader:
        for layer, found in enumerate(by_layer(reader)):
            assert set(found) == {0, 2, 4}
            assert all(
                same(found[2 * number], chunk.layers[layer]) for number, chunk in enumerate(CHUNKS)
            )
    assert layer == LAYERS - 1
    assert loading() == []
    assert reader.load_s > 0
    assert reader.wait_s > 0


@pytest.mark.parametrize(
    ("before", "a_read", "held"),
    [
        (0, 1, AHEAD + 1),
        (AHEAD, 1, AHEAD + 1),
        (8, 1, 8),
        (LAYERS, 1, LAYERS),
        (0, 5, 3),
        (4, 5, 7),
        (8, 5, LAYERS),
    ],
)
def test_so_many_layers_are_read_before_the_first_is_asked_for_and_no_more(
    store, monkeypatch, before, a_read, held
):
    came, read = [], store.read_layers

    def counted(key, first, count=1, *where):
        found = read(key, first, count, *where)
        came.extend(range(first, first + count))
        return found

    monkeypatch.setattr(store, "read_layers", counted)
    with LayerReader(store, plan("disk", a_read=a_read, before=before), LAYERS) as reader:
        until(lambda: len(came) >= held)
        assert came == list(range(held))
        found = zip(by_layer(reader), CHUNKS[0].layers, strict=True)
        assert all(same(layer[0], wanted) for layer, wanted in found)


@pytest.mark.parametrize("read", [0, 1, AHEAD + 1])
def test_leaving_early_by_an_error_leaves_no_thread(store, read):
    def leave():
        with LayerReader(store, plan("disk", "disk"), LAYERS) as reader:
            list(islice(by_layer(reader), read))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert loading() == []


@pytest.mark.parametrize("tiers", [(), ("memory", "memory")])
def test_without_slow_tiers_there_is_no_thread(store, tiers):
    with LayerReader(store, plan(*tiers), LAYERS) as reader:
        assert loading() == []
        assert list(next(by_layer(reader))) == [0, 2][: len(tiers)]


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("layer", [0, 1, AHEAD + 2])
def test_a_store_that_raises_loses_the_segment_and_nothing_hangs(store, tier, layer):
    wrong = Wrong(store, layer, RuntimeError("out of order"))
    with LayerReader(wrong, plan(tier, tier), LAYERS) as reader:
        *good, lost = islice(by_layer(reader), layer + 1)
    assert all(each[0] is not None for each in good)
    assert lost == {0: None, 2: None}


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_layers_are_lost_with_those_read_together(store, tier):
    wrong = Wrong(store, 4, RuntimeError("out of order"))
    with LayerReader(wrong, plan(tier, a_read=3), LAYERS) as reader:
        found = [layer[0] for layer in by_layer(reader)]
    # of reads of 1, 2, 3, 3, 3
    assert [layer for layer, kv in enumerate(found) if kv is None] == [3, 4, 5]
