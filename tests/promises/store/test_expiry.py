"""Many chunks at once: pinned, forgotten, and freed when they are too old."""

import pytest

from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier
from ragfuse.store.deletion import gc
from tests.kits.store import Clock, encoded, files, key, kv

MB = 1 << 20
KEYS = [key(i) for i in range(6)]
UNIT = encoded(kv())[0].nbytes


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def store(tmp_path, clock):
    """Memory and disk; entries are too old after a hundred seconds."""
    tiers = [MemoryTier(MB, lru, clock=clock), DiskTier(tmp_path, MB, lru, clock=clock)]
    with KVStore(tiers, ttl_s=100.0, clock=clock) as store:
        yield store


def where(store, *keys):
    """The tiers of each key."""
    return ["+".join(tier.name for tier in store.tiers if one in tier.stat([one])) for one in keys]


# too old


def test_what_is_too_old_is_a_miss_and_dropped_behind_the_answer(store, clock, tmp_path):
    store.put(KEYS[0], kv(), wait=True)
    clock.now += 60
    store.put(KEYS[1], kv(1), wait=True)
    assert set(store.lookup(KEYS)) == set(KEYS[:2])
    clock.now += 60
    assert set(store.lookup(KEYS)) == {KEYS[1]}
    store.flush()
    assert where(store, *KEYS[:2]) == ["", "memory+disk"]
    assert len(files(tmp_path)) == 1
    assert store.put(KEYS[0], kv(), wait=True)
    assert KEYS[0] in store.lookup(KEYS)


def test_what_is_used_does_not_grow_old_and_what_is_pinned_neither(store, clock):
    for one in KEYS[:3]:
        store.put(one, kv(), wait=True)
    store.pin([KEYS[2]])
    for _ in range(5):
        clock.now += 60
        store.read_layers(KEYS[0], 0)
    assert set(store.lookup(KEYS)) == {KEYS[0], KEYS[2]}


def test_what_is_used_in_memory_does_not_grow_old_on_disk_for_other_processes(
    store, clock, tmp_path
):
    store.report_every_s = 10.0
    for one in KEYS[:2]:
        store.put(one, kv(), wait=True)
    for _ in range(5):
        clock.now += 60
        assert store.read_layers(KEYS[0], 0) is not None  # from memory
        assert store.flush()
    assert store.tiers[1].stat([KEYS[0]])[KEYS[0]].hits == 0
    with KVStore([DiskTier(tmp_path, MB, lru, clock=clock)], ttl_s=100.0, clock=clock) as other:
        assert gc(other)["disk"][0] == 1
        assert set(other.lookup(KEYS)) == {KEYS[0]}


def test_gc_frees_what_is_too_old_and_not_what_is_pinned_or_used_while_it_lists(store, clock):
    for one in KEYS[:3]:
        store.put(one, kv(), wait=True)
    store.pin([KEYS[2]])
    clock.now += 120
    disk, real = store.tiers[1], store.tiers[1].list

    def slow():
        found = real()
        disk.get(KEYS[1], range(1))
        return found

    disk.list = slow
    freed = gc(store)
    assert {name: expired for name, (expired, _) in freed.items()} == {"memory": 2, "disk": 1}
    assert freed["disk"][1] > UNIT
    assert where(store, *KEYS[:3]) == ["", "disk", "memory+disk"]
    assert [*gc(store).values()] == [(0, 0), (0, 0)]
