"""What every tier keeps to. `test_contract.py` names the tiers, and runs these tests over each."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ragfuse.plan.evict import ConversationEvictor, by_next_use, lru
from tests.kits.store import encoded, encoded_at, key, kv


def put(tier, *names):
    for name in names:
        assert tier.put(key(name), *encoded(kv()))


def names(tier, *candidates):
    found = tier.stat([key(name) for name in candidates])
    return "".join(name for name in candidates if key(name) in found)


def layer(tier, of, at, level=None):
    found = tier.get(of, range(at, at + 1), level)
    return None if found is None else found[1].cpu()


class TierContract:
    """For every tier."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_every_layer_reads_back_bit_for_bit(self, make_tier, dtype):
        tier = make_tier()
        meta, blobs = encoded(kv(7, dtype=dtype))
        assert tier.put(key("a"), meta, blobs)
        for i, blob in enumerate(blobs):
            found, read = tier.get(key("a"), range(i, i + 1))
            assert torch.equal(read.cpu(), blob)
            for name in ("key_shape", "dtype"):
                assert getattr(found.layers[i], name) == getattr(meta.layers[i], name)
            assert (found.n_tokens, found.levels) == (meta.n_tokens, ("raw",))
            assert len(found.layers) == len(blobs)

    def test_every_layer_of_every_level_reads_back_alone_and_the_sizes_are_told_by_level(
        self, make_tier
    ):
        tier = make_tier()
        meta, blobs = encoded_at(kv(7), "raw", "int8")
        assert tier.put(key("a"), meta, blobs)
        for n, level in enumerate(("raw", "int8")):
            for i in range(3):
                assert torch.equal(layer(tier, key("a"), i, level), blobs[3 * n + i])
        found, *read = tier.get(key("a"), range(3), "int8")
        assert all(
            torch.equal(left.cpu(), right) for left, right in zip(read, blobs[3:], strict=True)
        )
        assert (found.levels, found.n_layers) == (("raw", "int8"), 3)
        assert torch.equal(layer(tier, key("a"), 1), blobs[1])
        entry = tier.stat([key("a")])[key("a")]
        assert list(entry.sizes) == ["raw", "int8"]
        assert entry.sizes["int8"] == meta.sizes["int8"]
        assert entry.nbytes >= meta.nbytes

    def test_an_entry_written_anew_at_other_levels_replaces_all_of_the_old_one(self, make_tier):
        tier = make_tier()
        both, one = encoded_at(kv(), "raw", "int8"), encoded_at(kv(), "int8")
        assert tier.put(key("a"), *both)
        assert layer(tier, key("a"), 0, "raw") is not None
        assert tier.put(key("a"), *one)
        assert list(tier.stat([key("a")])[key("a")].sizes) == ["int8"]
        assert torch.equal(layer(tier, key("a"), 0, "int8"), one[1][0])
        assert layer(tier, key("a"), 0, "raw") is None

    def test_what_was_never_written_is_none(self, make_tier):
        tier = make_tier()
        put(tier, "a")
        assert layer(tier, key("b"), 0) is None
        assert layer(tier, key("a"), 3) is None
        assert layer(tier, key("a"), 0, "cg1") is None
        assert tier.counts["corrupt"] == 0

    def test_entries_are_told_by_key_and_all(self, make_tier):
        tier = make_tier()
        put(tier, "a", "b")
        assert {entry.key for entry in tier.list()} == {key("a"), key("b")}
        assert tier.stat([]) == {}
        found = tier.stat([key("a"), key("c"), key("a")])
        assert set(found) == {key("a")}
        entry = found[key("a")]
        assert (entry.key, entry.tier) == (key("a"), tier.name)
        assert (entry.n_tokens, entry.n_layers) == (5, 3)
        assert (list(entry.sizes), entry.hits, entry.pinned) == (["raw"], 0, False)

    def test_deleted_entries_are_gone(self, make_tier):
        tier = make_tier()
        put(tier, "a", "b")
        layer(tier, key("a"), 0)
        assert tier.delete([key("a"), key("c")]) == 1
        assert [layer(tier, key("a"), i) for i in range(3)] == [None] * 3
        assert names(tier, "a", "b") == "b"
        assert tier.delete([key("a")]) == 0
        assert tier.delete([]) == 0

    def test_keys_that_differ_in_one_part_are_different_entries(self, make_tier):
        tier = make_tier()
        parts = ("model", "tokens", "context", "layout")
        base = dict.fromkeys(parts, "aa")
        keys = [type(key(0))(**{**base, part: "bb"}) for part in parts] + [type(key(0))("aa", "aa")]
        for seed, one in enumerate(keys):
            assert tier.put(one, *encoded(kv(seed)))
        for seed, one in enumerate(keys):
            assert torch.equal(layer(tier, one, 0), encoded(kv(seed))[1][0])

    def test_hints_of_use_do_no_harm(self, make_tier):
        tier = make_tier()
        put(tier, "a")
        tier.touch([key("a"), key("stranger")])
        tier.touch([])
        tier.expect([key("a"), key("stranger")], range(3))
        tier.pin([key("a")], True)
        assert names(tier, "a", "stranger") == "a"
        assert (tier.answers, tier.counts["failed"]) == (True, 0)

    def test_readers_see_whole_layers_or_nothing_while_others_write_and_delete(self, make_tier):
        tier = make_tier()
        wanted = [encoded(kv(i))[1] for i in range(4)]
        stop, wrong, seen = threading.Event(), [], []

        def read():
            while not stop.is_set():
                for i in range(4):
                    found = layer(tier, key(i), 1)
                    if found is not None:
                        seen.append(i)
                        if not torch.equal(found, wanted[i][1]):
                            wrong.append(i)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for round_ in range(2000):
                for i in range(4):
                    tier.put(key(i), *encoded(kv(i)))
                tier.delete([key(round_ % 4)])
                if round_ >= 6 and seen:
                    break
        finally:
            stop.set()
            reader.join()
        assert seen
        assert wrong == []
        assert tier.counts["corrupt"] == 0

    def test_a_tier_may_be_closed_twice(self, make_tier):
        tier = make_tier()
        put(tier, "a")
        tier.close()
        tier.close()


class CappedContract(TierContract):
    """For tiers with a capacity, which evict, pin, and count uses themselves."""

    @pytest.fixture
    def unit(self, make_tier):
        """Bytes that one entry of `kv()` takes in this kind of tier."""
        tier = make_tier()
        put(tier, "unit")
        return tier.nbytes

    def test_a_pass_over_one_level_is_one_hit_and_a_use(self, make_tier):
        tier = make_tier()
        assert tier.put(key("a"), *encoded_at(kv(), "raw", "int8"))
        before = tier.stat([key("a")])[key("a")]
        for i in range(3):
            layer(tier, key("a"), i, "int8")
        entry = tier.stat([key("a")])[key("a")]
        assert (before.hits, entry.hits) == (0, 1)
        assert entry.last_used > before.last_used

    def test_bytes_are_counted_and_the_least_recently_used_goes_first(self, make_tier, unit):
        tier = make_tier(3 * unit)
        put(tier, *"abca")
        layer(tier, key("b"), 0)
        put(tier, "d")
        assert names(tier, *"abcd") == "abd"
        tier.touch([key("a"), key("stranger")])  # a use elsewhere is no hit
        assert tier.stat([key("a")])[key("a")].hits == 0
        put(tier, "e")
        assert names(tier, *"abcde") == "ade"
        assert (tier.counts["evicted"], tier.nbytes) == (2, 3 * unit)
        tier.delete([key("a")])
        assert tier.nbytes == 2 * unit

    def test_what_cannot_fit_is_refused_and_drops_nothing(self, make_tier, unit):
        tier = make_tier(2 * unit, lambda entries: [])
        put(tier, "a", "b")
        assert not tier.put(key("c"), *encoded(kv()))
        assert not tier.put(key("big"), *encoded(kv(n=50)))
        assert names(tier, "a", "b", "c", "big") == "ab"
        assert (tier.counts["refused"], tier.counts["evicted"]) == (2, 0)
        assert not make_tier(0).put(key("a"), *encoded(kv()))

    def test_a_pinned_entry_stays_until_unpinned_or_deleted(self, make_tier, unit):
        tier = make_tier(2 * unit)
        put(tier, "a", "b")
        tier.pin([key("a"), key("b"), key("stranger")], True)
        assert not tier.put(key("c"), *encoded(kv()))
        assert names(tier, *"abc") == "ab"
        put(tier, "a")
        assert tier.stat([key("a")])[key("a")].pinned
        tier.pin([key("a")], False)
        put(tier, "c")
        assert names(tier, *"abc") == "bc"
        assert tier.delete([key("b")]) == 1
        put(tier, "b")
        assert not tier.stat([key("b")])[key("b")].pinned

    def test_a_policy_of_conversations_drops_whole_ones_and_whom_nobody_waits_for_first(
        self, make_tier, unit
    ):
        talks = {key(name): name[0] for name in ("a1", "a2", "b1", "b2", "c1", "d1")}
        tier = make_tier(
            5 * unit, ConversationEvictor(by_next_use, talks.get, lambda: {"a": 0.0, "c": 1.0})
        )
        put(tier, "a1", "b1", "a2", "b2", "c1")
        put(tier, "d1")
        assert names(tier, "a1", "a2", "b1", "b2", "c1", "d1") == "a1a2c1d1"

    def test_capacity_is_kept_under_concurrent_writers(self, make_tier, unit):
        tier = make_tier(4 * unit, lru)
        over, done = [], threading.Event()

        def watch():
            while not done.is_set():
                if tier.nbytes > tier.capacity:
                    over.append(tier.nbytes)
                done.wait(
                    0.001
                    # the writers get on meanwhile: beside one who only spins, each step of theirs waits
                )

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                kept = list(pool.map(lambda i: tier.put(key(i % 12), *encoded(kv())), range(48)))
        finally:
            done.set()
            watcher.join()
        assert over == []
        assert any(kept)
        assert tier.nbytes == unit * len(tier.list()) <= tier.capacity
