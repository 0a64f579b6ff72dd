"""KVStore over real tiers: found at once, saved behind the answer, promoted, forgotten for good,
never raising.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ragfuse.codec import RawCodec
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier
from tests.kits.redis_server import until
from tests.kits.store import HeldTier, encoded, files, key, kv, same

A, B = key("a"), key("b")
MB = 1 << 20


@pytest.fixture
def store(tmp_path):
    with KVStore([MemoryTier(MB, lru), DiskTier(tmp_path, MB, lru)]) as store:
        yield store


def reopened(store, path, **options):
    store.close()
    return KVStore([MemoryTier(MB, lru), DiskTier(path, MB, lru)], **options)


def layer_of(store, of, layer, **options):
    found = store.read_layers(of, layer, **options)
    return found and found[0]


def read(store, of, **options):
    return [layer_of(store, of, i, **options) for i in range(3)]


def whole(store, of, wanted, **options):
    return all(
        same(got, layer)
        for got, layer in zip(read(store, of, **options), wanted.layers, strict=True)
    )


class BrokenCodec(RawCodec):
    """Encodes, and cannot decode."""

    def decode(self, blob, meta):
        raise ValueError("these bytes make no sense")


# putting and finding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_put_comes_back_bit_for_bit_from_memory_and_after_a_restart_from_disk(
    store, tmp_path, dtype
):
    chunk = kv(3, n=9, dtype=dtype, n_layers=3)
    assert store.put(A, chunk)
    assert whole(store, A, chunk)
    assert layer_of(store, A, 0).keys.dtype == dtype
    with reopened(store, tmp_path) as opened:
        assert opened.lookup([A])[A].tier == "disk"
        assert whole(opened, A, chunk)


def test_a_chunk_is_found_at_once_while_its_saving_still_waits():
    slow = HeldTier()
    with KVStore([MemoryTier(MB, lru), slow]) as store:
        assert store.put(A, kv())
        assert slow.started.wait(60)
        assert store.lookup([A])[A].tier == "memory"
        assert whole(store, A, kv())
        assert slow.list() == []
        slow.go.set()
        assert store.flush()
        assert {entry.key for entry in slow.list()} == {A}


def test_changing_the_tensors_after_put_changes_nothing_kept(store):
    chunk, wanted = kv(), kv()
    store.put(A, chunk)
    for layer in chunk.layers:
        layer.keys.zero_()
        layer.values.zero_()
    assert whole(store, A, wanted)
    store.flush()
    assert whole(store, A, wanted, tier="disk")


def test_lookup_gives_the_fastest_tier_in_the_order_asked(store):
    store.put(A, kv(), wait=True)
    store.put(B, kv(), tier="disk", wait=True)
    found = store.lookup([B, key("c"), A, B])
    assert [(k, entry.tier) for k, entry in found.items()] == [(B, "disk"), (A, "memory")]
    assert store.lookup([]) == {}


def test_a_put_that_waits_says_whether_a_tier_took_it(tmp_path):
    for capacities, is_taken in (((1, 1), False), ((1, MB), True)):
        tiers = [DiskTier(tmp_path / str(i), n, lru, name=str(i)) for i, n in enumerate(capacities)]
        with KVStore(tiers) as store:
            assert store.put(A, kv(), wait=True) is is_taken
            assert store.put(B, kv(), pace_s=60.0) is is_taken


def test_a_paced_put_waits_for_one_slow_tier_and_not_for_all(tmp_path):
    hung, disk = HeldTier(), HeldTier("disk")
    with KVStore([hung, disk]) as store, ThreadPoolExecutor(1) as pool:
        saving = pool.submit(store.put, A, kv(), pace_s=60.0)
        assert hung.started.wait(60)
        assert disk.started.wait(60)
        assert not saving.done()
        disk.go.set()
        assert saving.result(60)
        assert [store.put(key(i), kv(), pace_s=60.0) for i in range(5)] == [True] * 5
        assert len(disk.list()) == 6
        assert hung.list() == []
        hung.go.set()


def test_each_tier_has_a_queue_of_its_own_and_what_it_drops_is_told(tmp_path, caplog):
    hung, disk = HeldTier(), DiskTier(tmp_path, MB, lru)
    with KVStore([hung, disk], writer_queue=1) as store:
        assert store.put(key(0), kv())
        assert hung.started.wait(60)
        for i in (1, 2, 3):
            until(lambda i=i: len(disk.list()) == i)
            assert store.put(key(i), kv())
        until(lambda: len(disk.list()) == 4)
        dropped = [each for each in caplog.records if "is not saved" in each.message]
        assert [each.args[1] for each in dropped] == [key(2), key(3)]
        hung.go.set()
        assert store.flush()
        assert {entry.key for entry in hung.list()} == {key(0), key(1)}


def test_closing_waits_for_all_tiers_together_no_longer_than_told(tmp_path):
    hung = [HeldTier(f"slow {i}") for i in range(3)]
    store = KVStore([*hung, DiskTier(tmp_path, MB, lru)])
    assert store.put(A, kv())
    assert store.put(B, kv())
    assert all(tier.started.wait(60) for tier in hung)
    store.close(0.05)
    for tier in hung:
        tier.go.set()
    assert store.flush(60)
    assert [[entry.key for entry in tier.list()] for tier in hung] == [[A]] * 3
    assert [{entry.key for entry in tier.list()} for tier in hung] == [{A}] * 3
    assert len(files(tmp_path)) == 2


# reading and promotion


def test_interleaved_chunks_are_promoted_and_half_read_ones_are_not(store, tmp_path):
    keys = [key(i) for i in range(5)]
    for i, one in enumerate(keys):
        store.put(one, kv(i), wait=True)
    with reopened(store, tmp_path) as opened:
        for layer in range(3):
            for one in keys[: 5 - (layer == 2)]:
                assert layer_of(opened, one, layer) is not None
        found = opened.lookup(keys)
        assert [found[one].tier for one in keys] == ["memory"] * 4 + ["disk"]
        assert all(whole(opened, one, kv(i), tier="memory") for i, one in enumerate(keys))


def test_bytes_that_cannot_be_decoded_are_dropped_counted_and_none(tmp_path):
    with KVStore([DiskTier(tmp_path, MB, lru)]) as store:
        store.levels.codec = lambda level, model, tables=None: BrokenCodec()
        store.put(A, kv(), wait=True)
        assert layer_of(store, A, 0) is None
        assert store.tiers[0].counts["corrupt"] == 1
        assert files(tmp_path) == []


# forgetting


def test_clear_forgets_one_model_or_all_and_salted_tenants_are_apart(store, tmp_path):
    mine, theirs = (
        [key(i, "model+salt 1") for i in range(3)],
        [key(i, "model+salt 2") for i in range(3)],
    )
    for one in (*mine, *theirs):
        store.put(one, kv(), wait=True)
    assert {entry.key for entry in store.clear(mine[0].model).entries} == set(mine)
    assert set(store.lookup([*mine, *theirs])) == set(theirs)
    assert read(store, mine[1]) == [None] * 3
    assert len(files(tmp_path)) == 3
    assert {entry.key for entry in store.clear().entries} == set(theirs)
    assert store.entries() == []
    assert files(tmp_path) == []


def test_an_entry_cleared_while_it_is_saved_does_not_come_back():
    slow = HeldTier()
    with KVStore([MemoryTier(MB, lru), slow]) as store:
        others = key("c", "other")
        for one in (A, B, others):
            store.put(one, kv())
        assert slow.started.wait(60)  # A is being written, B and the other wait
        store.clear(A.model)
        slow.go.set()
        store.flush()
        assert {entry.key for entry in slow.list()} == {others}
        assert set(store.lookup([A, B, others])) == {others}
        assert store.put(A, kv(), wait=True)
        assert {entry.key for entry in slow.list()} == {others, A}


def test_a_layer_read_before_a_clear_is_not_kept_after_it(store, tmp_path):
    single = kv(n_layers=1)
    store.put(A, single, wait=True)
    store.close()

    class Late(DiskTier):
        def get(self, *arguments):
            found = super().get(*arguments)
            opened.clear()
            return found

    with KVStore([MemoryTier(MB, lru), Late(tmp_path, MB, lru)]) as opened:
        assert same(layer_of(opened, A, 0), single.layers[0])
        assert opened.entries() == []


# pinning, closing


def test_a_pinned_chunk_is_not_evicted_from_any_tier(tmp_path):
    nbytes = encoded(kv())[0].nbytes
    with KVStore([MemoryTier(2 * nbytes, lru), DiskTier(tmp_path, 4 * nbytes, lru)]) as store:
        store.put(A, kv(1), wait=True)
        store.pin([A])
        for i in range(6):
            store.put(key(i), kv(), wait=True)
        assert {entry.tier for entry in store.entries() if entry.key == A} == {"memory", "disk"}


def test_a_closed_store_keeps_what_was_put_and_takes_no_more(store, tmp_path):
    for i in range(10):
        store.put(key(i), kv())
    store.close()
    store.close()
    assert len(files(tmp_path)) == 10
    assert not store.put(A, kv())
    assert layer_of(store, key(0), 0) is None
    assert store.lookup([key(0)]) == {}


# threads


def test_threads_that_put_read_and_clear_see_whole_chunks_or_none(tmp_path):
    chunks = [kv(i) for i in range(10)]
    keys = [key(i, f"m{i % 2}") for i in range(10)]
    nbytes = chunks[0].nbytes
    with KVStore([MemoryTier(4 * nbytes, lru), DiskTier(tmp_path, 8 * nbytes, lru)]) as store:

        def work(seed):
            seen = wrong = 0
            for i in range(40):
                one = (i * (seed + 3) + seed) % 10
                store.put(keys[one], chunks[one])
                for other, chunk in zip(keys, chunks, strict=True):
                    for layer, wanted in enumerate(chunk.layers):
                        got = layer_of(store, other, layer)
                        seen += got is not None
                        wrong += got is not None and not same(got, wanted)
                if i % 8 == 7:
                    store.clear(keys[seed % 2].model)
            return seen, wrong

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, range(4)))
        store.flush()
        assert sum(seen for seen, _ in results) > 0
        assert sum(wrong for _, wrong in results) == 0
        for tier in store.tiers:
            assert tier.counts["corrupt"] == 0
            assert tier.nbytes <= tier.capacity
        store.clear()
        assert store.entries() == files(tmp_path) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_takes_nothing_and_gives_the_room_back():
    tier = MemoryTier(MB, lru, device="cuda:7", name="gpu")
    assert not tier.put(A, *encoded(kv()))
    assert (tier.nbytes, tier.counts["failed"], tier.list()) == (0, 1, [])
