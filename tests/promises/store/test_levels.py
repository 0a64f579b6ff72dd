"""Entries at several codec levels: what is written where, and which one is read."""

import pytest

from ragfuse.codec import OtherTables, UniformCodec
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier
from ragfuse.store.redis import RedisTier
from tests.kits.redis_server import fresh_url
from tests.kits.store import encoded_at, key, kv, read_all, rounded, same

A, B = key("a"), key("b")
MB = 1 << 20
MIXED = {"memory": ["raw"], "disk": ["int8"], "redis": ["int8", "raw"]}


def two(path, **options):
    """A store over memory and disk."""
    return KVStore([MemoryTier(MB, lru), DiskTier(path, MB, lru)], **options)


@pytest.fixture
def mixed(tmp_path):
    """Raw in memory, 8 bits on disk, both in Redis."""
    tiers = [MemoryTier(MB, lru), DiskTier(tmp_path, MB, lru), RedisTier(fresh_url(), timeout_s=30)]
    with KVStore(tiers, levels=MIXED) as store:
        yield store


def levels_of(store, of=A):
    """{tier: levels} of one chunk."""
    return {
        tier.name: list(entry.sizes) for tier in store.tiers for entry in tier.stat([of]).values()
    }


def whole(store, wanted, of=A, **where):
    """Whether every layer of a chunk reads as `wanted`, first one by one and then all together."""
    each = [store.read_layers(of, i, **where) for i in range(3)]
    together = store.read_layers(of, 0, 3, **where)
    pairs = zip(each, together or (), wanted.layers, strict=True)
    return all(
        one is not None and same(one[0], right) and same(other, right)
        for one, other, right in pairs
    )


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


def test_what_is_read_raw_enters_memory_at_memorys_own_levels(tmp_path):
    for levels, found in (({"memory": ["int8"]}, ["int8"]), ({}, ["raw"])):
        with two(tmp_path, levels=levels) as store:
            store.put(A, kv(), tier="disk", wait=True)
            assert whole(store, kv(), tier="disk")
            assert store.flush()
            assert levels_of(store)["memory"] == found


@pytest.mark.parametrize("levels", [{}, {"memory": ["raw"]}])
def test_what_was_lost_is_never_kept_as_raw(tmp_path, levels):
    with two(tmp_path, levels=levels) as store:
        store.tiers[1].put(A, *encoded_at(kv(), "int8"))
        assert whole(store, rounded(kv()), tier="disk")
        assert levels_of(store)["memory"] == ["int8"]
        assert whole(store, rounded(kv()))
        store.tiers[0].delete([A])
        read_all(store, A)
        assert levels_of(store)["memory"] == ["int8"]


def test_layers_of_an_entry_that_is_written_anew_meanwhile_do_not_enter_memory_together(tmp_path):
    with two(tmp_path) as store:
        memory, disk = store.tiers
        for level, layers in (("int8", [0]), ("raw", [1, 2])):
            assert disk.put(A, *encoded_at(kv(), level))
            for layer in layers:
                store.read_layers(A, layer)
        assert whole(store, kv())
        assert memory.counts["corrupt"] == 0


def test_kv_that_a_level_cannot_hold_is_kept_raw(tmp_path, caplog):
    odd = kv()
    odd.layers[1].keys[0, 0, 0] = float("nan")
    with KVStore([DiskTier(tmp_path, MB, lru)], levels={"disk": ["int8"]}) as store:
        assert store.put(A, odd, wait=True)
        assert levels_of(store) == {"disk": ["raw"]}
    assert "cannot be stored at level int8" in caplog.text


# what cannot be decoded


class Tabled(UniformCodec):
    """A codec whose layers need other tables than those at hand."""

    def decode(self, blob, meta):
        raise OtherTables("tables aa wanted, bb found")


def test_layers_of_other_tables_are_a_miss_and_left_alone_and_the_other_level_is_read(
    tmp_path, caplog
):
    codecs = {"raw": UniformCodec(), "int8": Tabled()}
    with KVStore([DiskTier(tmp_path, MB, lru)]) as store:
        store.levels.codec = lambda level, model, tables="": codecs[level]
        store.tiers[0].put(A, *encoded_at(kv(), "int8"))
        assert list(store.lookup([A])) == [A]
        assert store.read_layers(A, 0, 3) is None
        assert store.lookup([A]) == {}
        assert "tables aa wanted, bb found" in store.levels.why_not(A)
        assert (levels_of(store), store.tiers[0].counts["corrupt"]) == ({"disk": ["int8"]}, 0)
    assert caplog.text.count("cannot be decoded at level int8 here") == 1
