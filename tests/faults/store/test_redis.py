"""The redis tier: a server that is down, hung or full, that evicts and expires, and processes that
are killed.
"""

import logging
import signal
import time

import pytest

from ragfuse.errors import StoreError
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore
from ragfuse.store.redis import RedisTier
from tests.kits.redis_server import RedisServer, until, value_name
from tests.kits.store import Clock, encoded, forked, key, kv, same

A, B = key("a"), key("b")


@pytest.fixture
def server(tmp_path):
    """A server of its own."""
    folder = tmp_path / "r"
    folder.mkdir()
    server = RedisServer(folder)
    yield server
    server.kill()


def first(tier, of=A):
    return tier.get(of, range(1))


def test_a_server_killed_between_two_layers_is_a_miss_and_another_tier_answers(
    server, tmp_path, caplog
):
    chunk = kv()
    tier, disk = RedisTier(server.url()), DiskTier(tmp_path / "store", 1 << 20, lru)
    with KVStore([tier, disk]) as store:
        assert store.put(A, chunk, wait=True)
        assert store.lookup([A])[A].tier == "redis"
        server.kill()
        for i in range(3):
            assert same(store.read_layers(A, i, tier="redis")[0], chunk.layers[i])
        assert store.lookup([A])[A].tier == "disk"
        assert store.put(B, chunk, wait=True)
        assert set(disk.stat([A, B])) == {A, B}
        assert store.silent() == ["redis"]
    assert len(caplog.records) == 1
    assert tier.counts["corrupt"] == 0


def test_a_hung_server_costs_one_timeout_and_is_used_again_once_it_goes_on(server, caplog):
    caplog.set_level(logging.INFO, "ragfuse.store")
    clock, tier = Clock(), RedisTier(server.url(), timeout_s=0.5)
    tier._breaker._clock = clock
    assert tier.put(A, *encoded(kv()))
    server.signal(signal.SIGSTOP)
    assert first(tier) is None
    server.signal(signal.SIGCONT)  # whoever asked now would be answered
    assert not tier.put(B, *encoded(kv()))
    assert (tier.delete([A]), tier.answers) == (0, False)
    assert tier.counts["failed"] == 3
    clock.now += 11
    until(lambda: first(tier) is not None)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_full_server_refuses_writes_and_goes_on_being_read(server, caplog):
    tier = RedisTier(server.url())
    assert tier.put(A, *encoded(kv()))
    server.raw().config_set("maxmemory", 1)
    for i in range(3):
        assert not tier.put(key(i), *encoded(kv(n=50)))
    assert first(tier) is not None
    assert (tier.counts["failed"], tier.answers) == (3, True)
    assert len(caplog.records) == 1


def test_an_entry_expires_unless_it_is_used(server):
    tier, raw = RedisTier(server.url(), ttl_s=1000.0, timeout_s=30), server.raw()
    for each in (A, B):
        assert tier.put(each, *encoded(kv()))
        assert 500 < raw.ttl(value_name(each)) <= 1000
        raw.expire(value_name(each), 100)
    tier.touch([A])
    assert 500 < raw.ttl(value_name(A)) <= 1000
    raw.pexpire(value_name(B), 1)
    until(lambda: set(tier.stat([A, B])) == {A})
    assert RedisTier(server.url()).put(A, *encoded(kv()))
    assert raw.ttl(value_name(A)) == -1


def test_a_writer_that_is_killed_leaves_no_entry(server):
    def work(pipe):
        tier = RedisTier(server.url())
        tier._client.rename = None
        pipeline = tier._client.pipeline

        def stopping(**options):
            made = pipeline(**options)
            made.rename = lambda *_: (pipe.send("stopped"), time.sleep(60))
            return made

        tier._client.pipeline = stopping
        tier.put(A, *encoded(kv()))

    process, pipe = forked(work)
    assert pipe.recv() == "stopped"
    process.kill()
    process.join()
    tier = RedisTier(server.url())
    assert (tier.stat([A]), first(tier), list(tier.list())) == ({}, None, [])
    (rest,) = server.raw().keys("*")
    assert 0 < server.raw().ttl(rest) <= 60


def test_a_url_that_is_none_is_refused_without_its_password():
    with pytest.raises(StoreError, match="RAGFUSE_TIERS") as caught:
        RedisTier("redis://me:hunter2@host:port/0")
    assert "hunter2" not in str(caught.value)
