"""What every tier keeps to. The tiers are named in conftest.py beside this file."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ragfuse.plan.evict import evictor, expired, lru
from ragfuse.store import KVStore, MemoryTier, bulk
from ragfuse.store.tier import Freed, Tidies, Touches
from ragfuse.types.kv import LayerKV
from tests.store.kit import encoded, encoded_at, key, kv, same


def put(tier, *names):
    for name in names:
        assert tier.write(key(name), *encoded(kv()))


def told(tier, meta):
    """Bytes that a tier's only entry, or one of two alike, says it has: in memory without what pads it there."""
    return meta.nbytes if isinstance(tier, MemoryTier) else tier.nbytes // len(tier.entries())


def names(tier, *candidates):
    found = tier.entries([key(name) for name in candidates])
    return "".join(name for name in candidates if key(name) in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_layer_reads_back_bit_for_bit(make_tier, dtype):
    tier = make_tier()
    meta, blobs = encoded(kv(7, dtype=dtype))
    assert tier.write(key("a"), meta, blobs)
    for i, blob in enumerate(blobs):
        found, read = tier.read(key("a"), i)
        assert torch.equal(read.cpu(), blob)
        assert (found.layers[i].key_shape, found.layers[i].dtype) == (meta.layers[i].key_shape, meta.layers[i].dtype)
        assert (found.n_tokens, found.levels, len(found.layers)) == (meta.n_tokens, ("raw",), len(blobs))


def test_every_layer_of_every_level_reads_back_alone_and_the_sizes_are_told_by_level(make_tier):
    tier = make_tier()
    meta, blobs = encoded_at(kv(7), "raw", "int8")
    assert tier.write(key("a"), meta, blobs)
    for level in ("int8", "raw"):
        for i in range(3):
            at = meta.first(level) + i
            found, read = tier.read(key("a"), at)
            assert torch.equal(read.cpu(), blobs[at])
            assert (found.levels, found.n_layers) == (("raw", "int8"), 3)
    found, *read = tier.read(key("a"), 3, 3)
    assert all(torch.equal(left.cpu(), right) for left, right in zip(read, blobs[3:], strict=True))
    assert tier.read(key("a"), 4, 3) is None
    entry = tier.entries([key("a")])[key("a")]
    assert list(entry.sizes) == ["raw", "int8"]
    assert entry.sizes["int8"] == meta.sizes["int8"]
    assert (entry.n_layers, entry.nbytes) == (3, told(tier, meta))
    assert tier.nbytes >= entry.nbytes
    if not isinstance(tier, MemoryTier) or (type(tier) is MemoryTier and not tier.copies):
        assert tier.nbytes == entry.nbytes


def test_a_pass_over_one_level_is_one_hit_also_for_who_did_not_write_it(make_tier):
    tier = make_tier()
    assert tier.write(key("a"), *encoded_at(kv(), "raw", "int8"))
    assert tier.entries()[key("a")].hits == 0
    for i in range(3, 6):
        tier.read(key("a"), i)
    assert tier.entries()[key("a")].hits == 1
    tier.read(key("a"), 0)
    assert tier.entries()[key("a")].hits == 2


def test_an_entry_written_anew_at_other_levels_replaces_all_of_the_old_one(make_tier):
    tier = make_tier()
    both, one = encoded_at(kv(), "raw", "int8"), encoded_at(kv(), "int8")
    assert tier.write(key("a"), *both)
    before = tier.nbytes
    assert tier.write(key("a"), *one)
    assert tier.nbytes < before
    assert list(tier.entries()[key("a")].sizes) == ["int8"]
    assert torch.equal(tier.read(key("a"), 0)[1].cpu(), one[1][0])
    assert tier.read(key("a"), 3) is None


def test_who_writes_an_entry_anew_in_a_full_tier_pushes_out_another_first_but_in_memory(make_tier, unit):
    tier = make_tier(2 * unit)
    put(tier, "a", "b")
    assert tier.write(key("a"), *encoded_at(kv(), "int8"))
    assert names(tier, *"ab") == ("ab" if isinstance(tier, MemoryTier) else "a")  # which gives up its room at once
    assert list(tier.entries()[key("a")].sizes) == ["int8"]


def test_what_was_never_written_is_none(make_tier):
    tier = make_tier()
    put(tier, "a")
    assert tier.read(key("b"), 0) is None
    assert tier.read(key("a"), 3) is None
    assert tier.read(key("a"), -1) is None
    assert tier.read(key("a"), 0) is not None
    assert tier.counts["corrupt"] == 0


def test_entries_tell_what_is_kept(make_tier, unit):
    tier = make_tier()
    put(tier, "a", "b")
    assert set(tier.entries()) == {key("a"), key("b")}
    assert tier.entries([]) == {}
    found = tier.entries([key("a"), key("c"), key("a")])
    assert set(found) == {key("a")}
    entry = found[key("a")]
    assert (entry.key, entry.tier, entry.n_tokens, entry.n_layers) == (key("a"), tier.name, 5, 3)
    assert (entry.sizes, entry.hits, entry.pinned) == ({"raw": told(tier, encoded(kv())[0])}, 0, False)
    assert tier.nbytes == 2 * unit


def test_a_read_is_a_use_and_a_pass_over_all_layers_one_hit(make_tier):
    tier = make_tier()
    put(tier, "a", "b")
    before = tier.entries()[key("a")].last_used
    for i in range(3):
        tier.read(key("a"), i)
    entry = tier.entries()[key("a")]
    assert entry.hits == 1
    assert entry.last_used > before


def test_a_use_elsewhere_is_a_use_and_no_hit(make_tier, unit):
    tier = make_tier(3 * unit)
    assert isinstance(tier, Touches)
    put(tier, *"abc")
    before = tier.entries()[key("a")]
    tier.touch([key("a"), key("stranger")])
    assert tier.entries()[key("a")].last_used > before.last_used
    assert tier.entries()[key("a")].hits == 0
    assert names(tier, "a", "stranger") == "a"
    tier.touch([])
    put(tier, "d")
    assert names(tier, *"abcd") == "acd"
    assert tier.counts["failed"] == 0


def test_deleted_entries_are_gone_with_their_bytes(make_tier, unit):
    tier = make_tier()
    put(tier, "a", "b")
    tier.read(key("a"), 0)
    assert tier.delete([key("a"), key("c")]) == 1
    assert [tier.read(key("a"), i) for i in range(3)] == [None] * 3
    assert tier.nbytes == unit
    assert tier.delete([key("a")]) == 0
    assert tier.counts["corrupt"] == 0


def test_writing_again_replaces_and_counts_once(make_tier, unit):
    tier = make_tier()
    put(tier, "a")
    meta, blobs = encoded(kv(9))
    assert tier.write(key("a"), meta, blobs)
    assert torch.equal(tier.read(key("a"), 1)[1].cpu(), blobs[1])
    assert tier.nbytes == unit
    assert len(tier.entries()) == 1


def test_keys_that_differ_in_one_part_are_different_entries(make_tier):
    tier = make_tier()
    parts = ("model", "tokens", "context", "layout")
    base = dict.fromkeys(parts, "aa")
    keys = [type(key(0))(**{**base, part: "bb"}) for part in parts] + [type(key(0))("aa", "aa")]
    for seed, one in enumerate(keys):
        assert tier.write(one, *encoded(kv(seed)))
    for seed, one in enumerate(keys):
        assert torch.equal(tier.read(one, 0)[1].cpu(), encoded(kv(seed))[1][0])


def test_the_least_recently_used_goes_first(make_tier, unit):
    tier = make_tier(3 * unit)
    put(tier, "a", "b", "c")
    tier.read(key("a"), 0)
    put(tier, "d")
    assert names(tier, *"abcd") == "acd"
    put(tier, "e")
    assert names(tier, *"abcde") == "ade"
    assert tier.counts["evicted"] == 2
    assert tier.nbytes == 3 * unit


def test_the_evictor_decides_who_goes(make_tier, unit):
    def newest_first(entries):
        return [entry.key for entry in sorted(entries, key=lambda entry: -entry.last_used)]

    tier = make_tier(3 * unit, newest_first)
    put(tier, *"abcd")
    assert names(tier, *"abcd") == "abd"


def test_an_evictor_that_names_strangers_twice_and_pinned_ones_does_no_harm(make_tier, unit):
    tier = make_tier(2 * unit, lambda entries: [key("x"), key("a"), key("b"), key("b"), key("x")])
    put(tier, "a", "b")
    tier.pin([key("a")], True)
    put(tier, "c")
    assert names(tier, *"abc") == "ac"


def test_an_evictor_that_gives_too_little_means_nothing_is_dropped(make_tier, unit):
    tier = make_tier(2 * unit, lambda entries: [])
    put(tier, "a", "b")
    assert not tier.write(key("c"), *encoded(kv()))
    assert names(tier, *"abc") == "ab"
    assert (tier.counts["refused"], tier.counts["evicted"]) == (1, 0)


def test_a_pinned_entry_stays_until_unpinned_or_deleted(make_tier, unit):
    tier = make_tier(2 * unit)
    put(tier, "a", "b")
    tier.pin([key("a"), key("b"), key("stranger")], True)
    assert not tier.write(key("c"), *encoded(kv()))
    assert names(tier, *"abc") == "ab"
    assert tier.entries()[key("a")].pinned
    tier.pin([key("a")], False)
    put(tier, "c")
    assert names(tier, *"abc") == "bc"
    assert tier.delete([key("b")]) == 1


def test_a_pin_survives_writing_again_and_not_deleting(make_tier, unit):
    tier = make_tier(3 * unit)
    put(tier, "a")
    tier.pin([key("a")], True)
    put(tier, "a")
    assert tier.entries()[key("a")].pinned
    tier.delete([key("a")])
    put(tier, "a")
    assert not tier.entries()[key("a")].pinned


def test_what_is_larger_than_the_tier_is_refused_and_drops_nothing(make_tier, unit):
    tier = make_tier(2 * unit)
    put(tier, "a", "b")
    assert not tier.write(key("big"), *encoded(kv(n=50)))
    assert names(tier, "a", "b", "big") == "ab"
    assert tier.counts["refused"] == 1


def test_a_tier_of_no_bytes_keeps_nothing(make_tier):
    tier = make_tier(0)
    assert not tier.write(key("a"), *encoded(kv()))
    assert tier.entries() == {}


def test_bytes_that_are_not_as_described_are_a_mistake_of_the_caller(make_tier):
    tier = make_tier()
    meta, blobs = encoded(kv())
    with pytest.raises(ValueError, match=r"described|shorter"):
        tier.write(key("a"), meta, (blobs[0][:-1], *blobs[1:]))
    with pytest.raises(ValueError, match=r"described|shorter"):
        tier.write(key("a"), meta, blobs[:-1])
    assert tier.entries() == {}


def test_a_policy_of_conversations_drops_whole_ones_and_whom_nobody_waits_for_first(make_tier, unit):
    talks = {key(name): name[0] for name in ("a1", "a2", "b1", "b2", "c1", "d1")}
    tier = make_tier(5 * unit, evictor("look-ahead", talks.get, lambda: {"a": 0.0, "c": 1.0}))
    put(tier, "a1", "b1", "a2", "b2", "c1")
    put(tier, "d1")
    assert names(tier, "a1", "a2", "b1", "b2", "c1", "d1") == "a1a2c1d1"


def test_capacity_is_kept_under_concurrent_writers(make_tier, unit):
    tier = make_tier(4 * unit)
    over, done = [], threading.Event()

    def watch():
        while not done.is_set():
            if tier.nbytes > tier.capacity:
                over.append(tier.nbytes)
            done.wait(0.001)  # the writers get on meanwhile: beside one who only spins, each step of theirs waits

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            kept = list(pool.map(lambda i: tier.write(key(i % 12), *encoded(kv())), range(48)))
    finally:
        done.set()
        watcher.join()
    assert over == []
    assert any(kept)
    assert tier.nbytes == unit * len(tier.entries()) <= tier.capacity


def test_readers_see_whole_layers_or_nothing_while_others_write_and_delete(make_tier, unit):
    tier = make_tier(6 * unit)
    wanted = [encoded(kv(i))[1] for i in range(8)]
    stop, wrong, seen = threading.Event(), [], []

    def read():
        while not stop.is_set():
            for i in range(8):
                for layer in range(3):
                    found = tier.read(key(i), layer)
                    if found is not None:
                        seen.append(i)
                        if not torch.equal(found[1].cpu(), wanted[i][layer]):
                            wrong.append((i, layer))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for round_ in range(2000):
            for i in range(8):
                tier.write(key(i), *encoded(kv(i)))
            tier.delete([key(round_ % 8)])
            if round_ >= 6 and seen:
                break
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert seen
    assert wrong == []
    assert tier.counts["corrupt"] == 0


def test_tidying_frees_nothing_that_is_kept(make_tier, unit):
    tier = make_tier()
    if not isinstance(tier, Tidies):
        pytest.skip("this tier leaves nothing behind")
    put(tier, "a", "b")
    assert tier.tidy() == Freed()
    assert names(tier, "a", "b") == "ab"
    assert tier.nbytes == 2 * unit
    assert torch.equal(tier.read(key("a"), 1)[1].cpu(), encoded(kv())[1][1])


def test_chunks_are_exported_from_imported_into_pinned_and_freed_in_it(make_tier, tmp_path):
    with KVStore([make_tier()]) as left, KVStore([make_tier()]) as right:
        for i in range(3):
            assert left.put(key(i), kv(i), wait=True)
        assert bulk.export(left, tmp_path / "a.tar", [key(0), key(1)]).chunks == 2
        assert bulk.import_(right, tmp_path / "a.tar").chunks == 2
        layer = right.read_layers(key(1), 2)[0]
        assert same(LayerKV(layer.keys.cpu(), layer.values.cpu()), kv(1).layers[2])
        right.pin(key(0), key(1))
        assert all(entry.pinned for entry in right.entries())
        right.unpin(key(0))
        right.expired = lambda entries, now_s: expired(entries, now_s, ttl_s=-math.inf)
        assert [freed.expired for freed in bulk.gc(right).values()] == [1]
        assert {entry.key for entry in right.entries()} == {key(1)}
        assert right.forget([key(1)]) == 1
        assert right.entries() == []


def test_chunks_are_moved_into_it_and_out_of_it(make_tier):
    tier = make_tier()
    with KVStore([tier, MemoryTier(1 << 20, lru, name="other place")]) as store:
        for i in range(3):
            assert store.put(key(i), kv(i), tier="other place")
        assert bulk.move(store, [key(0), key(1)], tier.name).chunks == 2
        assert {entry.key: entry.tier for entry in store.entries()} == {
            key(0): tier.name,
            key(1): tier.name,
            key(2): "other place",
        }
        assert bulk.move(store, [key(0)], "other place").chunks
        assert set(tier.entries()) == {key(1)}
