"""Several processes on one redis server: killed in the middle of a write, writing at once."""

import random
import time

import pytest
import torch

from ragfuse.plan.evict import lru
from ragfuse.store.redis import RedisTier
from ragfuse.store.redis_index import RedisIndex
from ragfuse.types.keys import FORMAT_VERSION
from tests.store.kit import encoded, forked, key, kv
from tests.store.redis_server import until

A, B, C = key("a"), key("b"), key("c")
PREFIX = f"ragfuse:{FORMAT_VERSION}:"


# killed writers

WEIGH = """
local sum = 0
for _, kind in ipairs({'chunk:*', 'new:*'}) do
  for _, name in ipairs(redis.call('KEYS', ARGV[1] .. kind)) do
    for _, field in ipairs(redis.call('HKEYS', name)) do
      sum = sum + redis.call('HSTRLEN', name, field)
    end
  end
end
return sum
"""


def weighed(raw):
    """Bytes of all entries as the server has them at one moment, whole or on their way."""
    return raw.eval(WEIGH, 0, PREFIX)


def stopped(url, capacity, call, lease_s):
    """A process that stands still in the middle of writing "a": with its room, or with all its bytes there as well."""

    def work(pipe):
        real = getattr(RedisIndex, call)

        def stop(index, *arguments):
            if call == "upload":
                name, lease, head, layers = arguments
                real(index, name, lease, head, layers[:1])
            pipe.send("stopped")
            time.sleep(60)

        setattr(RedisIndex, call, stop)
        RedisTier(url, capacity, lru, lease_s=lease_s).write(A, *encoded(kv()))

    process, pipe = forked(work)
    assert pipe.recv() == "stopped"
    return process


@pytest.mark.parametrize("call", ["upload", "publish"])
def test_a_killed_writer_leaves_no_entry_and_its_room_comes_back(url, raw, open_tier, unit, call):
    process = stopped(url, unit, call, 0.5)
    process.kill()
    process.join()
    tier = open_tier(unit)
    assert tier.entries() == {}
    assert tier.read(A, 0) is None
    until(lambda: tier.write(B, *encoded(kv())))
    assert (tier.nbytes, raw.keys(f"{PREFIX}new:*")) == (unit, [])


def test_the_bytes_of_a_killed_writer_go_even_if_nobody_ever_asks(url, raw, unit):
    process = stopped(url, unit, "publish", 0.2)
    process.kill()
    process.join()
    until(lambda: not raw.keys(f"{PREFIX}new:*"))


def test_a_living_writers_room_is_its_own(url, open_tier, unit):
    process = stopped(url, unit, "publish", 60)
    tier = open_tier(unit)
    assert tier.nbytes == unit
    assert not tier.write(B, *encoded(kv()))
    assert tier.tidy().orphans == 0
    process.kill()
    process.join()


def test_a_writer_that_took_too_long_keeps_nothing(open_tier, raw, caplog):
    tier = open_tier(lease_s=1e-4)
    assert not tier.write(A, *encoded(kv()))
    assert tier.counts["failed"] == 1
    assert str(A) in caplog.text
    assert (tier.entries(), raw.keys(f"{PREFIX}new:*")) == ({}, [])


@pytest.mark.parametrize("lost", ["room", "layer"])
def test_an_upload_that_lost_its_room_or_a_layer_becomes_no_entry(url, raw, lost):
    index = RedisIndex(url, 2.0, None)
    assert index.reserve("10:x", 100, 60.0, []) == (True, 0)
    index.upload("10:x", 60.0, b"head", [memoryview(b"layer")])
    assert index.run("weigh") == 10
    if lost == "room":
        raw.zrem(f"{PREFIX}writing", "10:x")
    else:
        raw.hdel(f"{PREFIX}new:10:x", "0")
    assert not index.publish("10:x", str(A), "5 1 raw=10", 1)
    assert raw.keys(f"{PREFIX}*") == []
    index.close()


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_writers_killed_at_any_moment_leave_whole_entries_and_nothing_else(url, raw, open_tier, count):
    wanted = [encoded(kv(i, n=300)) for i in range(4)]
    capacity, chance = 3 * sum(blob.numel() for blob in wanted[0][1]), random.Random(0)

    def work(pipe):
        tier = RedisTier(url, capacity, lru, lease_s=0.5)
        pipe.send("begun")
        for i in range(100_000):
            tier.write(key(i % 4), *wanted[i % 4])

    tier = open_tier(capacity)
    for _ in range(count):
        process, pipe = forked(work)
        assert pipe.recv() == "begun"
        time.sleep(0.05 * chance.random())
        process.kill()
        process.join()
        assert tier.nbytes <= capacity
    until(lambda: tier.tidy().orphans == 0 == raw.zcard(f"{PREFIX}writing"))
    assert raw.keys(f"{PREFIX}new:*") == []
    entries = tier.entries()
    for i in range(4):
        found = tier.read(key(i), 0, 3)
        assert (found is not None) == (key(i) in entries)
        assert found is None or all(map(torch.equal, found[1:], wanted[i][1]))
    assert tier.nbytes == weighed(raw)
    assert tier.counts["corrupt"] == 0


def test_four_processes_writing_at_once_keep_the_capacity_and_every_byte(url, raw, open_tier, unit):
    capacity, wanted = 6 * unit + 10, [encoded(kv(i)) for i in range(20)]

    def work(pipe, seed):
        tier = RedisTier(url, capacity, lru)
        kept = read = wrong = 0
        for i in range(60):
            name = (i * 7 + seed) % 20
            kept += tier.write(key(name), *wanted[name])
            for other in range(name - 3, name + 1):
                found = tier.read(key(other % 20), 0, 3)
                read += found is not None
                wrong += found is not None and not all(map(torch.equal, found[1:], wanted[other % 20][1]))
        pipe.send((kept, read, wrong, tier.counts["corrupt"], tier.counts["failed"]))

    pairs = [forked(lambda pipe, seed=seed: work(pipe, seed)) for seed in (0, 3, 6, 11)]
    tier = open_tier(capacity)
    while any(process.is_alive() for process, _ in pairs):
        assert tier.nbytes <= capacity
        assert weighed(raw) <= capacity
    for _, pipe in pairs:
        kept, read, *trouble = pipe.recv()
        assert kept > 20
        assert read > 0
        assert trouble == [0, 0, 0]
    assert weighed(raw) == tier.nbytes == unit * len(tier.entries()) <= capacity
    assert len(tier.entries()) > 3
