"""Entries at several codec levels: what is written where, which one is read, and what is recoded into what."""

import os
import signal
import time

import pytest

from ragfuse.codec import OtherTables, UniformCodec
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier, bulk
from ragfuse.store.recode import recode
from ragfuse.store.redis import RedisTier
from tests.store.kit import child, encoded_at, key, kv, rounded, same
from tests.store.redis_server import fresh_url, until

A, B = key("a"), key("b")
MB = 1 << 20
MIXED = {"memory": ["raw"], "disk": ["int8"], "redis": ["int8", "raw"]}


@pytest.fixture
def mixed(tmp_path):
    """Raw in memory, 8 bits on disk, both in Redis."""
    with KVStore(mixed_tiers(tmp_path), levels=MIXED) as store:
        yield store


def mixed_tiers(path):
    return [MemoryTier(MB, lru), DiskTier(path / "disk", MB, lru), RedisTier(fresh_url(), MB, lru)]


def levels_of(store, of=A):
    """{tier: levels} of one chunk."""
    found = {tier.name: tier.entries([of]) for tier in store.tiers}
    return {name: list(entries[of].sizes) for name, entries in found.items() if entries}


def whole(store, wanted, of=A, **where):
    """Whether every layer of a chunk reads as `wanted`, first one by one and then all together."""
    each = [store.read_layers(of, i, **where) for i in range(3)]
    together = store.read_layers(of, 0, 3, **where)
    pairs = zip(each, together or (), wanted.layers, strict=True)
    return all(one is not None and same(one[0], right) and same(other, right) for one, other, right in pairs)


# written and read


def test_each_tier_holds_a_chunk_at_its_own_levels_what_loses_least_first(mixed):
    assert mixed.put(A, kv(), wait=True)
    assert levels_of(mixed) == {"memory": ["raw"], "disk": ["int8"], "redis": ["raw", "int8"]}


@pytest.mark.parametrize(
    ("where", "exact"),
    [
        ({}, True),
        ({"tier": "disk"}, False),
        ({"tier": "redis"}, True),
        ({"tier": "redis", "level": "int8"}, False),
        ({"tier": "redis", "level": "raw"}, True),
        ({"level": "int8"}, False),
    ],
)
def test_a_level_reads_back_as_it_was_rounded_and_raw_as_it_was(mixed, where, exact):
    mixed.put(A, kv(), wait=True)
    assert not same(rounded(kv()).layers[0], kv().layers[0])
    assert whole(mixed, kv() if exact else rounded(kv()), **where)


def test_a_level_that_is_nowhere_is_read_at_one_that_loses_less_and_never_more(mixed):
    mixed.put(A, kv(), wait=True)
    assert whole(mixed, kv(), level="cg2")
    assert whole(mixed, rounded(kv()), tier="disk", level=None)
    mixed.tiers[0].delete([A])
    mixed.tiers[2].delete([A])
    assert mixed.read_layers(A, 0, 3, "redis", "raw") is None
    assert whole(mixed, rounded(kv()), tier="redis", level="int8")


def test_layers_behind_the_last_of_a_level_are_no_layers(mixed):
    mixed.put(A, kv(), wait=True)
    assert mixed.read_layers(A, 3, 1, "redis", "raw") is None
    assert mixed.read_layers(A, 2, 2, "redis", "raw") is None
    assert mixed.stats().corrupt == 0


def test_a_level_is_found_where_it_stands_by_one_read_after_a_look_up_and_by_two_without(tmp_path):
    with KVStore([DiskTier(tmp_path, MB, lru)]) as store:
        assert store.tiers[0].write(A, *encoded_at(kv(), "raw", "int8"))
        reads, read = [], store.tiers[0].read
        store.tiers[0].read = lambda *given: reads.append(given[1:]) or read(*given)
        assert store.read_layers(A, 1, 2, "disk", "int8") is not None
        assert reads == [(1, 2), (4, 2)]
        reads.clear()
        assert list(store.lookup([A])[A].sizes) == ["raw", "int8"]
        assert store.read_layers(A, 0, 1, "disk", "int8") is not None
        assert reads == [(3, 1)]


def test_an_entry_written_anew_at_other_levels_is_read_as_it_is_then(tmp_path):
    with KVStore([DiskTier(tmp_path, MB, lru)]) as store:
        disk = store.tiers[0]
        disk.write(A, *encoded_at(kv(1), "raw", "int8"))
        assert whole(store, rounded(kv(1)), level="int8")
        disk.write(A, *encoded_at(kv(2), "int8"))
        assert whole(store, rounded(kv(2)), level="int8")
        disk.write(A, *encoded_at(kv(3), "raw", "int8"))
        assert whole(store, kv(3), level="raw")
        disk.delete([A])
        assert store.read_layers(A, 0, 3, "disk", "raw") is None


def test_what_is_read_raw_enters_memory_at_memorys_own_levels(tmp_path):
    for levels, found in (({"memory": ["int8"]}, ["int8"]), ({}, ["raw"])):
        with KVStore([MemoryTier(MB, lru), DiskTier(tmp_path, MB, lru)], levels=levels) as store:
            store.put(A, kv(), tier="disk", wait=True)
            assert whole(store, kv(), tier="disk")
            until(lambda store=store: "memory" in levels_of(store))
            assert levels_of(store)["memory"] == found


@pytest.mark.parametrize("levels", [{}, {"memory": ["raw"]}])
def test_what_was_lost_is_never_kept_as_raw(tmp_path, levels):
    with KVStore([MemoryTier(MB, lru), DiskTier(tmp_path, MB, lru)], levels=levels) as store:
        store.tiers[1].write(A, *encoded_at(kv(), "int8"))
        assert whole(store, rounded(kv()), tier="disk")
        assert levels_of(store)["memory"] == ["int8"]
        assert whole(store, rounded(kv()))
        store.tiers[0].delete([A])
        assert store.promote(A)
        assert levels_of(store)["memory"] == ["int8"]


def test_kv_that_a_level_cannot_hold_is_kept_raw(tmp_path, caplog):
    odd = kv()
    odd.layers[1].keys[0, 0, 0] = float("nan")
    with KVStore([DiskTier(tmp_path, MB, lru)], levels={"disk": ["int8"]}) as store:
        assert store.put(A, odd, wait=True)
        assert levels_of(store) == {"disk": ["raw"]}
    assert "stored without level int8" in caplog.text


# what cannot be decoded


class Tabled(UniformCodec):
    """A codec whose layers need other tables than those at hand."""

    def decode(self, blob, meta):
        raise OtherTables("tables aa wanted, bb found")


def test_a_level_without_a_codec_is_not_there_and_left_alone(tmp_path):
    with KVStore([DiskTier(tmp_path, MB, lru)], lambda level, model: None) as store:
        store.tiers[0].write(A, *encoded_at(kv(), "int8"))
        assert store.why_not(A) == ""
        assert store.lookup([A, B]) == {}
        assert store.read_layers(A, 0) is None
        assert store.why_not(A) == "it cannot be decoded: this store has no codec tables for level int8"
        assert (store.why_not(B), levels_of(store)) == ("", {"disk": ["int8"]})
        store.delete(A)
        store.lookup([A])
        assert store.why_not(A) == ""


def test_layers_of_other_tables_are_a_miss_and_left_alone_and_the_other_level_is_read(tmp_path, caplog):
    codecs = {"raw": UniformCodec(4), "int8": Tabled()}
    with KVStore([DiskTier(tmp_path, MB, lru)], lambda level, model: codecs[level]) as store:
        store.tiers[0].write(A, *encoded_at(kv(), "int8"))
        assert list(store.lookup([A])) == [A]
        assert store.read_layers(A, 0, 3) is None
        assert store.lookup([A]) == {}
        assert store.why_not(A) == "it cannot be decoded: tables aa wanted, bb found"
        assert (levels_of(store), store.stats().corrupt) == ({"disk": ["int8"]}, 0)
    assert caplog.text.count("cannot be decoded here at level int8") == 1


# moving and recoding


def test_moving_takes_the_entry_that_lost_least_with_all_its_levels(tmp_path):
    with KVStore(mixed_tiers(tmp_path)) as store:
        memory, disk, redis = store.tiers
        memory.write(A, *encoded_at(kv(), "int8"))
        disk.write(A, *encoded_at(kv(), "raw", "int8"))
        redis.write(A, *encoded_at(kv(), "int8"))
        assert bulk.move(store, [A], "redis").chunks
        assert levels_of(store) == {"redis": ["raw", "int8"]}
        assert whole(store, kv())


@pytest.mark.parametrize("wanted", [["int8"], ["int8", "raw"], ["raw"]])
def test_recoding_keeps_an_entry_at_just_these_levels(tmp_path, wanted):
    with KVStore([DiskTier(tmp_path, MB, lru)]) as store:
        store.put(A, kv(), wait=True)
        store.pin(A)
        before, told = store.tiers[0].nbytes, []
        done = recode(store, [("disk", A)], wanted, lambda *numbers: told.append(numbers))
        changed = wanted != ["raw"]
        assert (done.chunks, done.known, done.failed) == (changed, not changed, 0)
        assert done.fewer_nbytes == before - store.tiers[0].nbytes
        assert sorted(levels_of(store)["disk"]) == sorted(wanted)
        assert store.entries()[0].pinned
        assert told == [(before, before)]
        assert whole(store, kv() if "raw" in wanted else rounded(kv()))


def test_recoding_never_makes_less_lossy_what_was_lost_and_says_so(tmp_path):
    with KVStore([DiskTier(tmp_path, MB, lru)]) as store:
        store.tiers[0].write(A, *encoded_at(kv(), "int8"))
        for wanted in (["raw"], ["raw", "int8"], ["cg2"]):
            done = recode(store, [("disk", A)], wanted)
            assert (done.chunks, done.failed, levels_of(store)) == (0, 1, {"disk": ["int8"]})
            assert "only what is stored raw can be encoded" in done.troubles[0].why
        assert whole(store, rounded(kv()))


def test_recoding_takes_raw_from_another_tier_and_leaves_that_alone(mixed):
    mixed.put(A, kv(), wait=True)
    mixed.tiers[0].delete([A])
    assert recode(mixed, [("disk", A)], ["raw", "int8"]).chunks == 1
    assert levels_of(mixed) == {"disk": ["raw", "int8"], "redis": ["raw", "int8"]}
    assert whole(mixed, kv(), tier="disk")


def test_recoding_to_a_level_without_a_codec_changes_nothing_and_says_so(tmp_path):
    with KVStore([DiskTier(tmp_path, MB, lru)]) as store:
        store.put(A, kv(), wait=True)
        done = recode(store, [("disk", A), ("disk", B)], ["cg1"])
        assert (done.chunks, done.failed, levels_of(store)) == (0, 1, {"disk": ["raw"]})
        assert "no codec tables of its model for level cg1" in done.troubles[0].why


def test_recoding_a_full_tier_pushes_out_at_most_what_one_entry_needs(tmp_path):
    with KVStore([DiskTier(tmp_path, MB, lru)]) as store:
        for i in range(8):
            store.put(key(i), kv(i), wait=True)
        store.tiers[0].capacity = store.tiers[0].nbytes
        done = recode(store, [("disk", key(i)) for i in range(8)], ["int8"])
        assert done.chunks >= 7
        assert len(store.entries()) >= 7
        assert {tuple(entry.sizes) for entry in store.entries()} == {("int8",)}


RECODE = """
    import sys
    from ragfuse.plan.evict import lru
    from ragfuse.store import DiskTier, KVStore
    from ragfuse.store.recode import recode

    with KVStore([DiskTier(sys.argv[1], 1 << 28, lru)]) as store:
        keys = [entry.key for entry in store.entries()]
        recode(store, [("disk", key) for key in keys], ["int8"], lambda *_: print("one more", flush=True))
"""


@pytest.mark.slow
def test_a_recoding_killed_at_any_moment_leaves_each_entry_whole_as_before_or_after(tmp_path):
    chunks = {key(i): kv(i, n=400) for i in range(40)}
    with KVStore([DiskTier(tmp_path, 1 << 28, lru)]) as store:
        for one, chunk in chunks.items():
            store.put(one, chunk, wait=True)
    seen = set()
    for attempt in range(2):
        process = child(RECODE, tmp_path)
        for _ in range(3 + attempt):
            assert process.stdout.readline() == "one more\n"
        time.sleep(0.002 * attempt)  # somewhere in the next one
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        with KVStore([DiskTier(tmp_path, 1 << 28, lru)]) as store:
            assert {entry.key for entry in store.entries()} == set(chunks)
            for one, chunk in chunks.items():
                (level,) = levels_of(store, one)["disk"]
                assert whole(store, chunk if level == "raw" else rounded(chunk), one)
                seen.add(level)
    assert seen == {"raw", "int8"}
