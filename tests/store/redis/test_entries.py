"""The redis tier against damage: what is shared, what vanishes, what is tidied."""

import json
import random

import pytest
import torch
from blake3 import blake3

from ragfuse.plan.evict import lru
from ragfuse.store import redis_index, redis_pieces
from ragfuse.types.keys import FORMAT_VERSION
from tests.store.kit import encoded, key, kv, ticks
from tests.store.redis_server import chunk_name, until

A, B, C = key("a"), key("b"), key("c")
PREFIX = f"ragfuse:{FORMAT_VERSION}:"


# damage


def head_with(head: bytes, **changes) -> bytes:
    """The head with other fields, its checksum right again."""
    fields = json.loads(head[32:])
    fields["key"] = changes.pop("key", fields["key"])
    fields["meta"] = json.dumps({**json.loads(fields["meta"]), **changes})
    text = json.dumps(fields).encode()
    return blake3(text).digest() + text


def wrong_shape(head):
    layers = json.loads(json.loads(head[32:])["meta"])["layers"]
    layers[1]["key_shape"][1] += 1
    return head_with(head, layers=layers)


def flipped(data, at=0):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE = {
    "a flipped bit in the head": ("head", lambda data: flipped(data, 60)),
    "a flipped bit in the head's checksum": ("head", flipped),
    "a head cut short": ("head", lambda data: data[:-1]),
    "an empty head": ("head", lambda data: b""),
    "no head": ("head", None),
    "another's key": ("head", lambda data: head_with(data, key=str(B))),
    "no key": ("head", lambda data: head_with(data, key=None)),
    "a newer version": ("head", lambda data: head_with(data, version=FORMAT_VERSION + 1)),
    "a wrong shape": ("head", wrong_shape),
    "a wrong number of tokens": ("head", lambda data: head_with(data, n_tokens=6)),
    "no layers described": ("head", lambda data: head_with(data, layers=[])),
    "a head that is no head": ("head", lambda data: blake3(b"[]").digest() + b"[]"),
    "a flipped bit in a layer": ("0", flipped),
    "a layer cut short": ("0", lambda data: data[:-1]),
    "a layer longer than it should be": ("0", lambda data: data + b"\0"),
    "no layer": ("0", None),
}


@pytest.mark.parametrize(("field", "damage"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_dropped_counted_and_named(tier, raw, field, damage, caplog):
    name = chunk_name(A)
    if damage is None:
        raw.hdel(name, field)
    else:
        raw.hset(name, field, damage(raw.hget(name, field)))
    assert tier.read(A, 0) is None
    assert str(A) in caplog.text
    assert (tier.counts["corrupt"], tier.entries(), tier.nbytes, raw.exists(name)) == (1, {}, 0, 0)
    assert tier.read(A, 0) is None
    assert tier.counts["corrupt"] == 1
    assert tier.write(A, *encoded(kv()))
    assert tier.read(A, 0) is not None


def test_a_head_rewritten_unchanged_is_no_damage(tier, raw):
    raw.hset(chunk_name(A), "head", head_with(raw.hget(chunk_name(A), "head")))
    assert tier.read(A, 2) is not None
    assert tier.counts["corrupt"] == 0


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_byte_and_every_cut_is_noticed(tier, raw, count):
    meta, blobs = encoded(kv())
    name, chance = chunk_name(A), random.Random(0)
    for i in range(count):
        assert tier.write(A, meta, blobs)
        field = chance.choice(["head", "0", "1", "2"])
        data = raw.hget(name, field)
        at = chance.randrange(len(data))
        rest = b"" if i % 2 else bytes([data[at] ^ chance.randint(1, 255)]) + data[at + 1 :]
        raw.hset(name, field, data[:at] + rest)
        assert tier.read(A, 0, 3) is None
        assert tier.counts["corrupt"] == i + 1


def test_without_verify_no_checksum_of_a_layer_is_looked_at(tier, raw, open_tier):
    raw.hset(chunk_name(A), "0", flipped(raw.hget(chunk_name(A), "0")))
    assert open_tier(verify=False).read(A, 0) is not None
    assert tier.read(A, 0) is None


def test_a_key_of_ours_that_holds_something_else_is_a_miss(tier, raw):
    raw.set(chunk_name(A), b"mine")
    assert tier.read(A, 0) is None
    assert (tier.counts["corrupt"], tier.nbytes) == (1, 0)
    assert tier.write(A, *encoded(kv()))


def test_bytes_the_server_evicted_are_a_miss(tier, raw, caplog):
    raw.delete(chunk_name(A))
    assert tier.read(A, 1) is None
    assert (tier.counts["corrupt"], tier.nbytes) == (1, 0)
    assert "bytes are gone" in caplog.text


@pytest.mark.parametrize(
    "row",
    [b"", b"7", b"x 0 0 1.0 5 3 raw=0", b"\xff 0 0 1.0 5 3 raw=0", b"9 0 0 1.0 5 3 raw=10", b"9 0 0 1.0 5 0 raw=9"],
)
def test_a_row_that_tells_of_no_entry_is_dropped(tier, raw, row):
    raw.hset(f"{PREFIX}rows", str(A), row)
    assert tier.entries([A]) == {}
    assert tier.counts["corrupt"] == 1
    assert raw.hget(f"{PREFIX}rows", str(A)) is None
    raw.hset(f"{PREFIX}rows", "no key", b"1 0 0 1.0 5 3 raw=1")
    assert tier.entries() == {}
    assert tier.write(A, *encoded(kv()))


def test_a_server_emptied_behind_our_back_is_all_misses(tier, raw):
    raw.flushdb()
    assert tier.read(A, 0) is None
    assert (tier.entries(), tier.nbytes, tier.counts["corrupt"]) == ({}, 0, 0)
    assert tier.write(A, *encoded(kv()))
    assert tier.read(A, 0) is not None


# several on one server


def test_two_tiers_on_one_database_share_entries_hits_and_pins(tier, open_tier):
    other = open_tier(name="there")
    assert torch.equal(other.read(A, 1)[1], encoded(kv())[1][1])
    assert other.read(A, 0) is not None
    other.pin([A], True)
    entry = tier.entries()[A]
    assert (entry.hits, entry.pinned, entry.tier) == (1, True, "redis")
    assert other.delete([A]) == 1
    assert tier.read(A, 0) is None
    assert tier.counts["corrupt"] == 0


def test_other_keys_and_databases_of_the_server_are_left_alone(tier, raw):
    others = {b"rows": b"1", b"ragfuse": b"2", b"ragfuse:0:chunk:x": b"3"}
    raw.mset(others)
    tier.delete(tier.entries())
    tier.tidy()
    assert {name: raw.get(name) for name in raw.keys("*") if not name.startswith(PREFIX.encode())} == others


def test_a_lookup_and_a_read_of_layers_are_one_round_trip_each_and_keys_is_never_asked(server, open_tier):
    tier, raw = open_tier(url=server.url()), server.raw()
    for name in (A, B):
        assert tier.write(name, *encoded(kv()))

    def asked(work):
        raw.config_resetstat()
        work()
        calls = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in raw.info("commandstats").items()}
        assert not calls.keys() & {"keys", "hgetall"}
        return {name: calls.get(name, 0) for name in ("evalsha", "hmget", "exec")}

    assert asked(lambda: tier.entries([A, B, C])) == {"evalsha": 1, "hmget": 1, "exec": 0}  # hmget inside the script
    assert asked(lambda: tier.read(A, 1, 2)) == {"evalsha": 0, "hmget": 1, "exec": 0}
    assert asked(lambda: tier.read(A, 0, 3)) == {"evalsha": 1, "hmget": 1, "exec": 0}  # sent together
    assert asked(lambda: tier.write(C, *encoded(kv()))) == {"evalsha": 2, "hmget": 0, "exec": 1}
    assert asked(lambda: len(tier.entries())) == {"evalsha": 1, "hmget": 0, "exec": 0}
    asked(tier.tidy)


def test_scripts_the_server_forgot_are_brought_again(tier, raw):
    raw.script_flush()
    assert tier.read(A, 0) is not None
    assert tier.entries()[A].hits == 1
    raw.script_flush()
    assert tier.write(B, *encoded(kv()))
    assert set(tier.entries()) == {A, B}


def test_more_entries_than_a_page_come_back_and_the_oldest_go_first(open_tier, monkeypatch, unit):
    monkeypatch.setattr(redis_index, "_MANY", 3)
    tier = open_tier(10 * unit, clock=ticks())
    for i in range(10):
        assert tier.write(key(i), *encoded(kv()))
    assert list(tier.entries()) == [key(i) for i in range(10)]
    assert set(tier.entries([key(i) for i in range(12)])) == {key(i) for i in range(10)}
    tier.pin([key(i) for i in range(7)], True)
    assert tier.write(key(10), *encoded(kv()))
    assert tier.delete([key(i) for i in range(11)]) == 10
    assert (tier.counts["evicted"], tier.nbytes) == (1, 0)


def test_while_one_lists_others_look_up_read_weigh_and_write(tier, monkeypatch, unit):
    monkeypatch.setattr(redis_index, "_MANY", 1)
    wanted = {A, *map(key, range(40))}
    for each in wanted:
        assert tier.write(each, *encoded(kv()))
    rows = tier._index.rows(None)
    seen = {next(rows)[0]}
    assert tier.nbytes == 41 * unit
    assert set(tier.entries([A])) == {A}
    assert tier.read(A, 0) is not None
    assert tier.write(key(0), *encoded(kv()))
    pages = list(rows)
    assert seen | {name for name, _ in pages} == {str(each).encode() for each in wanted}


def test_a_smaller_capacity_drops_nothing_before_it_writes(tier, open_tier, unit):
    assert tier.write(B, *encoded(kv()))
    smaller = open_tier(unit)
    assert set(smaller.entries()) == {A, B}
    assert smaller.write(C, *encoded(kv()))
    assert set(smaller.entries()) == {C}
    assert smaller.nbytes == unit


def test_capacity_is_kept_to_the_byte(open_tier, unit):
    tier = open_tier(2 * unit - 1, clock=ticks())
    assert tier.write(A, *encoded(kv()))
    assert tier.write(B, *encoded(kv()))
    assert set(tier.entries()) == {B}
    assert not open_tier(unit - 1).write(C, *encoded(kv()))


def test_who_is_used_while_victims_are_chosen_is_none(open_tier, unit):
    other = open_tier()

    def slow(entries):
        keys = list(lru(entries))
        if not other.entries()[A].hits:
            assert other.read(A, 0) is not None
        return keys

    tier = open_tier(2 * unit, evict=slow)
    for name in (A, B, C):
        assert tier.write(name, *encoded(kv()))
    assert set(tier.entries()) == {A, C}
    assert tier.counts["evicted"] == 1


def test_layers_that_are_brought_in_several_batches_are_one_entry(open_tier, monkeypatch):
    monkeypatch.setattr(redis_pieces, "MIN_PIECE_NBYTES", 100)
    tier = open_tier()
    meta, blobs = encoded(kv(3))
    assert tier.write(A, meta, blobs)
    assert all(torch.equal(found, blob) for found, blob in zip(tier.read(A, 0, 3)[1:], blobs, strict=True))


def test_a_layer_larger_than_redis_takes_is_refused(tier, caplog):
    meta, _ = encoded(kv(n_layers=1))
    blob = torch.empty((512 << 20) + 1, dtype=torch.uint8)  # never touched, so no memory is taken
    layer = type(meta.layers[0])((1, 5, 8), (1, 5, 8), "bfloat16", blob.numel())
    assert not tier.write(B, type(meta)(5, ("raw",), (layer,)), [blob])
    assert tier.counts["refused"] == 1
    assert str(B) in caplog.text


def test_after_closing_everything_is_a_miss(tier):
    tier.close()
    tier.close()
    assert tier.read(A, 0) is None
    assert (tier.entries(), tier.nbytes, tier.delete([A])) == ({}, 0, 0)
    assert not tier.write(B, *encoded(kv()))


# time to live


def due(raw, name=A):
    return raw.zscore(f"{PREFIX}due", str(name))


def test_an_entry_vanishes_so_long_after_its_last_use(open_tier, raw, unit):
    tier = open_tier(ttl_s=3600)
    assert tier.write(A, *encoded(kv()))
    assert tier.write(B, *encoded(kv()))
    written = due(raw)
    assert tier.read(A, 0) is not None
    assert due(raw) > written
    assert 3590 < raw.ttl(chunk_name(A)) <= 3601  # so the bytes go even if nobody asks any more
    raw.zadd(f"{PREFIX}due", {str(A): 1})
    assert set(tier.entries([A, B])) == {B}
    assert tier.nbytes == unit
    assert raw.exists(chunk_name(A)) == 0
    raw.zadd(f"{PREFIX}due", {str(B): 1})
    assert tier.read(B, 0) is None
    assert (tier.nbytes, tier.counts["corrupt"]) == (0, 0)


def test_what_the_server_let_go_on_time_is_a_plain_miss(open_tier):
    tier = open_tier(ttl_s=0.05)
    assert tier.write(A, *encoded(kv()))
    until(lambda: tier.read(A, 1) is None)
    assert (tier.counts["corrupt"], tier.entries(), tier.nbytes) == (0, {}, 0)


def test_more_entries_due_than_one_call_clears_are_plain_misses(open_tier, raw):
    tier = open_tier(ttl_s=3600)
    assert tier.write(A, *encoded(kv()))
    names = {f"m.{i}.-.-": 1 for i in range(1000)}
    raw.hset(f"{PREFIX}rows", mapping=dict.fromkeys(names, "0 0 0 1.0 5 3 raw=0"))
    raw.zadd(f"{PREFIX}due", {**names, str(A): 2})
    raw.delete(chunk_name(A))
    assert tier.read(A, 1) is None
    assert (tier.entries(), tier.nbytes, tier.counts["corrupt"]) == ({}, 0, 0)


def test_what_is_touched_vanishes_later_and_goes_last_without_a_hit(open_tier, raw):
    tier = open_tier(ttl_s=3600, clock=ticks())
    for name in (A, B, C):
        assert tier.write(name, *encoded(kv()))
        raw.pexpire(chunk_name(name), 1000)
    before = due(raw)
    tier.pin([C], True)
    tier.touch([A, key("stranger"), C, A])
    assert due(raw) > before
    assert raw.ttl(chunk_name(A)) > 3590 > raw.ttl(chunk_name(B))
    assert (due(raw, C), raw.ttl(chunk_name(C))) == (None, -1)
    assert {entry.key: entry.hits for entry in tier.entries().values()} == {A: 0, B: 0, C: 0}
    assert [entry.key for entry in tier.entries().values() if not entry.pinned] == [B, A]
    assert raw.exists(chunk_name(key("stranger"))) == 0
    raw.zadd(f"{PREFIX}due", {str(B): 1})
    tier.touch([B])  # too late
    assert set(tier.entries()) == {A, C}


def test_touching_many_is_few_round_trips(server, open_tier):
    tier, raw = open_tier(url=server.url(), ttl_s=3600), server.raw()
    assert tier.write(A, *encoded(kv()))
    raw.config_resetstat()
    tier.touch([A, *map(key, range(600))])
    tier.touch([])
    assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] == 2
    server.kill()
    tier.touch([A])
    tier.touch([A])
    assert tier.breaker.is_open


def test_a_pinned_entry_does_not_vanish_until_it_is_unpinned(open_tier, raw):
    tier = open_tier(ttl_s=3600)
    assert tier.write(A, *encoded(kv()))
    tier.pin([A], True)
    tier.read(A, 0)
    assert tier.write(A, *encoded(kv()))
    assert (due(raw), raw.ttl(chunk_name(A))) == (None, -1)
    tier.pin([A], False)
    assert due(raw) is not None
    assert raw.ttl(chunk_name(A)) > 0


def test_without_a_time_to_live_a_use_keeps_for_good(open_tier, raw):
    assert open_tier(ttl_s=3600).write(A, *encoded(kv()))
    assert open_tier().read(A, 0) is not None
    assert (due(raw), raw.ttl(chunk_name(A))) == (None, -1)


# tidying


def test_tidying_frees_what_no_row_speaks_of_and_counts_anew(tier, raw, unit):
    raw.hset(f"{PREFIX}chunk:{B}", mapping={"head": b"12", "0": b"345"})
    raw.hset(f"{PREFIX}new:77:0e57", "0", b"6789")
    raw.hincrby(f"{PREFIX}rows", "", 1000)
    freed = tier.tidy()
    assert (freed.orphans, freed.nbytes) == (2, 9)
    assert raw.keys(f"{PREFIX}[cn]*") == [chunk_name(A).encode()]
    assert tier.nbytes == unit
    assert tier.read(A, 0) is not None


def test_tidying_drops_and_names_entries_whose_bytes_are_gone(tier, raw, caplog):
    raw.delete(chunk_name(A))
    tier.tidy()
    assert (tier.entries(), tier.nbytes, tier.counts["corrupt"]) == ({}, 0, 1)
    assert str(A) in caplog.text
