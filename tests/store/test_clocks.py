"""A clock that ran ahead: what was used beyond now was used now, in every index, and grows old from here on."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing

import pytest

from ragfuse.plan.evict import expired, lru
from ragfuse.sessions.session import Session
from ragfuse.store import CatalogFile, DiskTier, MemoryTier
from ragfuse.store.objects import ObjectTier
from ragfuse.store.redis import RedisTier
from ragfuse.store.session_catalog import SessionRow
from tests.store.kit import Clock, encoded, key, kv
from tests.store.redis_server import fresh_url

YEAR_S = 365 * 86400.0
A, B, C = map(key, "abc")


def in_memory(path, capacity, clock):
    return MemoryTier(capacity, lru, clock=clock)


def on_disk(path, capacity, clock):
    return DiskTier(path, capacity, lru, clock=clock)


def behind_a_url(path, capacity, clock):
    return ObjectTier(path.as_uri(), capacity, lru, clock=clock, fresh_s=0.0)


def behind_a_url_with_uses(path, capacity, clock):
    return ObjectTier(path.as_uri(), capacity, lru, clock=clock, fresh_s=0.0, ttl_s=100 * YEAR_S)


TIERS = [in_memory, on_disk, behind_a_url, behind_a_url_with_uses]


@pytest.mark.parametrize("make", TIERS, ids=lambda make: make.__name__)
def test_an_entry_that_was_used_beyond_now_was_used_now_and_grows_old(make, tmp_path):
    clock = Clock(time.time())
    unit = 0
    with closing(make(tmp_path / "unit", 1 << 20, clock)) if make is not in_memory else _open(make, clock) as tier:
        tier.write(A, *encoded(kv(1)))
        unit = tier.nbytes
    tier = make(tmp_path / "tier", 2 * unit, clock)
    now, clock.now = clock.now, clock.now + YEAR_S
    assert tier.write(A, *encoded(kv(1)))
    assert tier.read(A, 0) is not None
    clock.now = now
    assert tier.write(B, *encoded(kv(2)))
    assert {entry.last_used for entry in tier.entries().values()} == {now}
    assert list(expired(tier.entries().values(), now + 50, 10.0)) in ([A, B], [B, A])
    assert tier.entries([A])[A].last_used == now
    clock.now = now + 20
    assert tier.read(B, 0) is not None
    tier.touch([B])
    assert tier.write(C, *encoded(kv(3)))
    assert set(tier.entries()) == {B, C}, "what was not used since the clock was set right went first"


def _open(make, clock):
    tier = make(None, 1 << 20, clock)
    tier.close = lambda: None
    return closing(tier)


def test_a_later_process_takes_a_use_beyond_now_on_disk_for_a_use_now(tmp_path):
    clock = Clock(time.time())
    with closing(DiskTier(tmp_path, 1 << 20, lru, clock=clock)) as tier:
        tier.write(A, *encoded(kv(1)))
        tier.write(B, *encoded(kv(2)))
        unit = tier.nbytes // 2
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as index, index:
        index.execute("UPDATE entries SET last_used = last_used + ? WHERE key = ?", (YEAR_S, str(A)))
    with closing(DiskTier(tmp_path, 2 * unit, lru, clock=clock)) as tier:
        assert tier.entries()[A].last_used == clock.now
        clock.now += 20
        tier.touch([B])
        tier.write(C, *encoded(kv(3)))  # the first to look at the order writes down that A was used now
        clock.now += 20
        tier.touch([C])
        (kept,) = set(tier.entries()) - {C}
        tier.write(key("d"), *encoded(kv(4)))
        assert set(tier.entries()) == {C, key("d")}, f"{kept} went, whenever it was used"


def test_a_touch_writes_down_no_use_beyond_now(tmp_path):
    clock = Clock(time.time())
    with closing(DiskTier(tmp_path, 1 << 20, lru, clock=clock)) as tier:
        tier.write(A, *encoded(kv(1)))
        now, clock.now = clock.now, clock.now + YEAR_S
        tier.touch([A])
        clock.now = now + 5
        tier.touch([A])
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as index:
        assert index.execute("SELECT last_used FROM entries").fetchall() == [(now + 5,)]


def test_a_file_whose_row_was_lost_and_whose_time_is_beyond_now_is_adopted_as_used_now(tmp_path):
    clock = Clock(time.time())
    with closing(DiskTier(tmp_path, 1 << 20, lru, clock=clock)) as tier:
        tier.write(A, *encoded(kv(1)))
        (file,) = [path for path in (tmp_path / "chunks").rglob("*") if path.is_file()]
        os.utime(file, (clock.now + YEAR_S, clock.now + YEAR_S))
        with closing(sqlite3.connect(tmp_path / "index.sqlite")) as index, index:
            index.execute("DELETE FROM entries")
        tier.tidy()
        assert tier.entries()[A].last_used == clock.now


@pytest.mark.parametrize("ttl_s", [None, YEAR_S])
def test_an_object_that_was_written_beyond_now_was_used_now(tmp_path, ttl_s):
    clock = Clock(time.time())
    with closing(ObjectTier(tmp_path.as_uri(), 1 << 20, lru, clock=clock, ttl_s=ttl_s)) as tier:
        for name in (A, B):
            tier.write(name, *encoded(kv(1)))
        unit = tier.nbytes // 2
    for path in tmp_path.rglob("*"):
        if path.is_file() and A.tokens in path.name:
            os.utime(path, (clock.now + YEAR_S, clock.now + YEAR_S))
    with closing(ObjectTier(tmp_path.as_uri(), 2 * unit, lru, clock=clock, ttl_s=ttl_s, fresh_s=0.0)) as tier:
        assert tier.entries()[A].last_used == clock.now
        clock.now += 20
        assert tier.entries()[A].last_used == clock.now - 20
        tier.touch([B])
        tier.write(C, *encoded(kv(3)))
        assert set(tier.entries()) == {B, C}


def test_an_entry_that_redis_says_was_used_beyond_now_was_used_now_and_grows_old():
    import redis

    url = fresh_url()
    with closing(RedisTier(url, 1 << 20, lru, timeout_s=30.0)) as tier, closing(redis.Redis.from_url(url)) as client:
        for name in (A, B):
            tier.write(name, *encoded(kv(1)))
        unit, (prefix,) = tier.nbytes // 2, {name[: -len("rows")] for name in client.keys("*rows")}
        row = client.hget(prefix + b"rows", str(A)).decode().split(" ")
        row[3] = f"{float(row[3]) + YEAR_S:.6f}"
        client.hset(prefix + b"rows", str(A), " ".join(row))
        client.zadd(prefix + b"used", {str(A): float(row[3])})
        assert abs(tier.entries()[A].last_used - time.time()) < 60
    with closing(RedisTier(url, 2 * unit, lru, timeout_s=30.0)) as tier:
        tier.touch([B])  # whoever writes sets right what is ahead
        tier.touch([B])
        assert tier.entries()[A].last_used <= tier.entries()[B].last_used
        tier.write(C, *encoded(kv(3)))
        assert set(tier.entries()) == {B, C}


def test_a_session_that_was_used_beyond_now_was_used_now_once_another_is_written(tmp_path):
    now = time.time()
    with CatalogFile(tmp_path) as book:
        state = Session("one").as_dict()
        for name, used in (("one", now + YEAR_S), ("two", now)):
            assert book.sessions.put(SessionRow("model", name, 0, used, 0, 0), state, (), ())
        assert {line.id: line.used for line in book.sessions.rows()} == {"one": now, "two": now}
