"""The redis tier where the server, those who share it or their clocks do it harm: misses and one sentence, no more."""

import random
import socket
import threading
import time

import pytest
import torch

from ragfuse.plan.evict import expired
from ragfuse.store import redis_index
from ragfuse.store.redis import RedisTier
from ragfuse.types.keys import FORMAT_VERSION
from tests.store.kit import encoded, forked, key, kv, seen_whole
from tests.store.redis_server import RedisServer, chunk_name, free_port

A, B, C = key("a"), key("b"), key("c")
PREFIX = f"ragfuse:{FORMAT_VERSION}:"


def use(tier):
    """All that can be asked of a tier; what it gave."""
    written = tier.write(A, *encoded(kv()))
    found = tier.read(A, 0, 3)
    assert found is None or all(map(torch.equal, found[1:], encoded(kv())[1]))
    tier.pin([A], True)
    tier.touch([A])
    tier.tidy()
    return written, found is not None, tier.entries([A]), tier.entries(), tier.nbytes, tier.delete([A])


NOTHING = (False, False, {}, {}, 0, 0)


def told(caplog) -> str:
    """The one sentence about the server, beside that of the delete."""
    first, *others = [record.getMessage() for record in caplog.records]
    assert [other.startswith("Did not delete 1 entries") for other in others] == [True]
    assert "script:" not in first
    return first


def test_a_database_that_does_not_exist_is_told_once_with_what_to_do(tmp_path, open_tier, caplog):
    server = RedisServer(tmp_path, "--databases", 16)
    assert use(open_tier(url=server.url(16))) == NOTHING
    assert "DB index is out of range; give the URL of a database" in told(caplog)
    assert f"127.0.0.1:{server.port}/16" in caplog.text
    server.kill()


def test_tls_to_a_server_without_is_left_out(server, open_tier, caplog):
    tier = open_tier(url=f"rediss://127.0.0.1:{server.port}/0", timeout_s=0.3, cool_down_s=3600)
    assert use(tier) == NOTHING
    assert tier.breaker.is_open
    first = told(caplog)
    assert f"rediss://127.0.0.1:{server.port}/0" in first
    assert "asks for TLS (rediss://), which most likely is not spoken there: give redis://" in first


def test_a_server_that_answers_tls_in_plain_words_is_told_as_one_without(open_tier, caplog):
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer():
            with plain.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        open_tier(url=f"rediss://127.0.0.1:{plain.getsockname()[1]}/0", cool_down_s=3600)
        thread.join()
    assert "asks for TLS (rediss://), which most likely" in caplog.text


def test_a_server_that_is_not_there_is_not_said_to_lack_tls(open_tier, caplog):
    open_tier(url=f"rediss://127.0.0.1:{free_port()}/0", cool_down_s=3600)
    assert "refused" in caplog.text
    assert "asks for TLS" not in caplog.text


RIGHTS = {
    "no writing": ["+@read", "+@connection", "+@scripting"],
    "no scripts": ["+@all", "-@scripting"],
    "no transactions": ["+@all", "-multi", "-exec"],
}


@pytest.mark.parametrize("rights", RIGHTS.values(), ids=RIGHTS.keys())
def test_a_user_without_enough_rights_is_told_which(server, open_tier, rights, caplog):
    server.raw().execute_command("ACL", "SETUSER", "me", "on", ">pw", "~*", *rights)
    tier = open_tier(url=server.url(auth="me:pw@"))
    assert not any(use(tier))
    assert "give its user the right to" in caplog.text
    assert server.raw().keys("*chunk:*") == []


@pytest.mark.parametrize("name", ["rows", "used", "due", "writing"])
def test_a_strangers_key_under_a_name_of_ours_is_named_and_left_alone(url, raw, open_tier, name, caplog):
    raw.set(PREFIX + name, b"mine")
    tier = open_tier(ttl_s=60)
    assert not use(tier)[0]
    assert f"something else is stored under names {PREFIX}*" in caplog.text
    assert len(caplog.records) == 2
    assert raw.get(PREFIX + name) == b"mine"
    raw.delete(PREFIX + name)
    assert tier.write(B, *encoded(kv()))
    assert tier.read(B, 0, 3) is not None


def test_a_replica_gives_what_it_has_and_takes_nothing(server, open_tier, caplog):
    tier = open_tier(url=server.url())
    assert tier.write(A, *encoded(kv()))
    server.raw().replicaof("127.0.0.1", free_port())
    assert tier.read(A, 0, 3) is not None
    assert set(tier.entries()) == {A}
    assert not tier.write(B, *encoded(kv()))
    assert "give the URL of the primary" in caplog.text


# a server that forgets


@pytest.mark.parametrize("name", ["rows", "used", "due", "writing"])
def test_an_index_that_the_server_evicts_comes_back_by_use(raw, open_tier, name, unit):
    tier = open_tier(2 * unit, ttl_s=3600)
    for each in (A, B):
        assert tier.write(each, *encoded(kv()))
    raw.delete(PREFIX + name)
    assert all(tier.write(key(i), *encoded(kv(i))) for i in range(4))
    tier.tidy()
    assert set(tier.entries()) == {key(2), key(3)}
    assert tier.nbytes == 2 * unit
    assert len(raw.keys(f"{PREFIX}chunk:*")) == 2
    assert tier.counts["failed"] == 0


def test_an_order_that_the_server_evicts_is_made_anew_though_it_came_back_by_a_use(raw, open_tier, unit):
    tier = open_tier(3 * unit)
    for each in (A, B, C):
        assert tier.write(each, *encoded(kv()))
    raw.delete(f"{PREFIX}used")
    assert tier.read(B, 0) is not None
    assert tier.write(key("d"), *encoded(kv()))
    assert set(tier.entries()) == {B, C, key("d")}  # not the one used last, though it alone was in order
    raw.delete(f"{PREFIX}used")
    tier.pin([B], True)
    assert tier.read(C, 0) is not None
    large = encoded(kv(n=10))
    assert tier.write(A, *large)  # which takes the room of both that are not pinned
    assert set(tier.entries()) == {A, B}
    assert tier.nbytes <= 3 * unit


def test_tidying_mends_the_order(raw, open_tier, unit):
    tier = open_tier(3 * unit)
    for each in (A, B, C):
        assert tier.write(each, *encoded(kv()))
    raw.delete(f"{PREFIX}used")
    raw.zadd(f"{PREFIX}used", {str(C): 1, "stranger": 2, str(key("gone")): 3})
    tier.tidy()
    assert raw.zrange(f"{PREFIX}used", 0, -1) == [str(each).encode() for each in (A, B, C)]


def test_an_index_that_nobody_has_counted_is_counted_before_room_is_made(raw, open_tier, unit):
    tier = open_tier(2 * unit)
    for each in (A, B):
        assert tier.write(each, *encoded(kv()))
    raw.hdel(f"{PREFIX}rows", "#")
    raw.delete(f"{PREFIX}used")
    assert tier.write(C, *encoded(kv()))
    assert set(tier.entries()) == {B, C}
    assert int(raw.hget(f"{PREFIX}rows", "#")) == 2


def test_where_all_is_pinned_nothing_is_looked_for(server, open_tier):
    tier, raw = open_tier(url=server.url()), server.raw()
    for each in (A, B):
        assert tier.write(each, *encoded(kv()))
    tier.pin([A, B], True)
    raw.config_resetstat()
    assert list(tier._index.oldest()) == []
    calls = raw.info("commandstats")
    assert calls["cmdstat_evalsha"]["calls"] == 1
    assert not calls.keys() & {"cmdstat_hgetall", "cmdstat_hvals", "cmdstat_hscan"}


@pytest.mark.parametrize("n", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_recount_page_by_page_is_right_whatever_others_do_between_pages(server, open_tier, monkeypatch, n):
    raw, chance = server.raw(), random.Random(n)
    raw.config_set("hash-max-listpack-entries", 0)  # else a small index is one page
    monkeypatch.setattr(redis_index, "_MANY", 8)
    tier, other = open_tier(1 << 30, url=server.url()), open_tier(1 << 30, url=server.url())
    wanted = [encoded(kv(n=length)) for length in (3, 5)]
    for i in range(n):
        assert tier.write(key(i), *chance.choice(wanted))
    raw.hincrby(f"{PREFIX}rows", "", 12345)
    raw.hincrby(f"{PREFIX}rows", "#", -7)
    raw.delete(f"{PREFIX}used")
    changes = [
        lambda name: other.write(name, *chance.choice(wanted)),
        lambda name: other.delete([name]),
        lambda name: other.read(name, 0),
        lambda name: other.pin([name], chance.random() < 0.5),
    ]
    real, pages = tier._index.run, []

    def run(command, *arguments):
        result = real(command, *arguments)
        if command == "recount":
            pages.append(result)
            for _ in range(6):
                chance.choice(changes)(key(chance.randrange(2 * n)))
            if len(pages) == 4:
                other._index.recount()  # begins later, and ends it for both
        return result

    monkeypatch.setattr(tier._index, "run", run)
    tier._index.recount()
    assert len(pages) > 4
    entries = tier.entries()
    free = {str(entry.key).encode() for entry in entries.values() if not entry.pinned}
    assert tier.nbytes == sum(entry.nbytes for entry in entries.values())
    assert int(raw.hget(f"{PREFIX}rows", "#")) == len(free)
    assert set(raw.zrange(f"{PREFIX}used", 0, -1)) == free
    assert raw.keys(f"{PREFIX}sum:*") == []
    assert raw.hget(f"{PREFIX}rows", "~") is None


@pytest.mark.parametrize("lost", ["rows", "sum:*"])
def test_a_recount_of_which_the_server_drops_something_ends_and_the_next_one_is_right(
    server, open_tier, monkeypatch, lost
):
    raw = server.raw()
    raw.config_set("hash-max-listpack-entries", 0)
    monkeypatch.setattr(redis_index, "_MANY", 2)
    tier = open_tier(url=server.url())
    for i in range(20):
        assert tier.write(key(i), *encoded(kv()))
    real, dropped = tier._index.run, []

    def run(command, *arguments):
        result = real(command, *arguments)
        if command == "recount" and not dropped:
            dropped.append(raw.delete(*raw.keys(PREFIX + lost)))
            assert tier.write(key(20), *encoded(kv()))
        return result

    monkeypatch.setattr(tier._index, "run", run)
    tier._index.recount()
    assert dropped == [1]
    for _ in range(2):
        assert tier.nbytes == sum(entry.nbytes for entry in tier.entries().values()) > 0
        tier.tidy()


def test_a_server_without_memory_is_recounted_all_the_same(server, open_tier):
    tier, raw = open_tier(url=server.url()), server.raw()
    assert tier.write(A, *encoded(kv()))
    nbytes = tier.nbytes
    raw.hincrby(f"{PREFIX}rows", "", 1000)
    raw.config_set("maxmemory", 1)
    tier.tidy()
    assert (tier.nbytes, tier.counts["failed"]) == (nbytes, 0)


def test_a_server_that_evicts_what_it_likes_never_gives_a_wrong_byte(server, open_tier):
    tier, raw = open_tier(1 << 30, url=server.url(), ttl_s=3600), server.raw()
    raw.config_set("maxmemory-policy", "allkeys-random")
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + (1 << 20))
    wanted = [encoded(kv(i, n=300)) for i in range(20)]
    kept = read = 0
    for i in range(200):
        kept += tier.write(key(i % 20), *wanted[i % 20])
        for j in range(20):
            found = tier.read(key(j), j % 2, 2)
            read += found is not None
            assert found is None or all(map(torch.equal, found[1:], wanted[j][1][j % 2 :]))
    assert kept > 100
    assert read > 100
    assert raw.info("stats")["evicted_keys"] > 20
    raw.config_set("maxmemory", 0)
    tier.tidy()
    assert tier.nbytes == sum(entry.nbytes for entry in tier.entries().values())
    assert {str(name) for name in tier.entries()} == {
        name.decode().removeprefix(chunk_name("")) for name in raw.keys(chunk_name("*"))
    }


def test_a_server_flushed_at_any_moment_never_gives_a_wrong_byte(raw, open_tier):
    tier, done, chance = open_tier(), threading.Event(), random.Random(0)
    wanted = [encoded(kv(i, n=100)) for i in range(4)]

    def flush():
        while not done.wait(0.002 * chance.random()):
            raw.flushdb()

    thread = threading.Thread(target=flush)
    thread.start()
    read = 0
    for i in range(400):
        tier.write(key(i % 4), *wanted[i % 4])
        found = tier.read(key(i % 4), 0, 3)
        read += found is not None
        assert found is None or all(map(torch.equal, found[1:], wanted[i % 4][1]))
    done.set()
    thread.join()
    assert read > 0
    assert tier.counts["corrupt"] == 0
    assert tier.write(A, *encoded(kv()))
    tier.tidy()
    assert tier.nbytes == sum(entry.nbytes for entry in tier.entries().values())


def test_data_lost_between_look_up_and_read_are_a_plain_miss(server, open_tier):
    tier = open_tier(url=server.url(), cool_down_s=0)
    assert tier.write(A, *encoded(kv()))
    assert A in tier.entries([A])
    server.kill()
    server.start()
    assert [tier.read(A, layer) for layer in range(3)] == [None] * 3
    assert tier.counts["corrupt"] == 0


# others


def test_two_processes_that_write_one_chunk_at_once_leave_one_of_both_whole(url, raw, open_tier, unit):
    wanted = [encoded(kv(i)) for i in range(2)]

    def work(pipe, i):
        tier = RedisTier(url, 1 << 20, list)
        pipe.recv()
        for _ in range(150):
            tier.write(A, *wanted[i])
        pipe.send(tier.counts["failed"])

    pairs = [forked(lambda pipe, i=i: work(pipe, i)) for i in range(2)]
    tier = open_tier()
    for _, pipe in pairs:
        pipe.send("go")
    seen = seen_whole(tier, A, wanted, lambda: any(process.is_alive() for process, _ in pairs))
    assert [pipe.recv() for _, pipe in pairs] == [0, 0]
    assert seen
    assert tier.counts["corrupt"] == 0
    assert (tier.nbytes, raw.keys(f"{PREFIX}new:*")) == (unit, [])


def test_machines_whose_clocks_differ_by_hours_agree_on_who_was_used_last(open_tier, unit):
    ahead = open_tier(2 * unit, clock=lambda: time.time() + 7200)
    behind = open_tier(2 * unit, clock=lambda: time.time() - 7200)
    assert ahead.write(A, *encoded(kv()))
    assert behind.write(B, *encoded(kv()))
    for tier, hours in ((ahead, 2), (behind, -2)):
        entries = tier.entries([A, B])
        assert all(abs(entry.last_used - time.time() - 3600 * hours) < 60 for entry in entries.values())
        assert list(expired(entries.values(), time.time() + 3600 * hours, ttl_s=600)) == []
    assert behind.write(C, *encoded(kv()))
    assert set(ahead.entries()) == {B, C}
    assert behind.read(B, 0) is not None
    assert ahead.write(A, *encoded(kv()))
    assert set(behind.entries()) == {A, B}
