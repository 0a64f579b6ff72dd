"""How entries in objects grow old, who hears of their uses, and what room they make."""

import os
import time
from pathlib import Path
from urllib.parse import unquote

from ragfuse.plan.evict import expired, lru
from ragfuse.store import KVStore, MemoryTier, bulk
from ragfuse.store.names import CHUNKS_FOLDER, USES_FOLDER, chunk_name
from ragfuse.store.tier import Freed
from tests.store.kit import asked, encoded, key, kv, ticks
from tests.store.objects.kit import A, B, objects, opened, warnings, weight, weight_of_one
from tests.store.redis_server import until


def test_entries_unused_for_too_long_are_gone_unless_pinned(folder):
    now = [1000.0]
    tier = opened(folder, ttl_s=60.0, clock=lambda: now[0])
    for name in "abc":
        assert tier.write(key(name), *encoded(kv()))
    unit = tier.nbytes // 3
    tier.pin([B], True)
    now[0] += 50
    assert tier.read(key("c"), 0) is not None
    now[0] += 50
    assert tier.read(A, 0) is None
    assert set(tier.entries([A, B, key("c")])) == {B, key("c")}
    assert tier.tidy() == Freed(expired=1, nbytes=unit)
    assert not (folder / chunk_name(A)).exists()
    assert tier.nbytes == 2 * unit


def test_entries_that_are_too_old_make_room(folder):
    unit, now = weight_of_one(folder.with_name("one")), [1000.0]
    tier = opened(folder, 2 * unit, ttl_s=60.0, clock=lambda: now[0])
    for name in (A, B):
        assert tier.write(name, *encoded(kv()))
    now[0] += 100
    assert tier.write(key("c"), *encoded(kv()))
    assert set(tier.entries()) == {key("c")}
    assert weight(folder) == 2 * unit


def test_what_is_touched_is_used_without_a_hit(folder):
    now = [1000.0]
    tier = opened(folder, ttl_s=60.0, clock=lambda: now[0])
    for name in "abc":
        assert tier.write(key(name), *encoded(kv()))
    now[0] += 50
    tier.touch([A, key("stranger")])
    tier.touch([])
    now[0] += 50
    tier.touch([B])  # too late
    assert set(tier.entries([A, B, key("c"), key("stranger")])) == {A}
    assert (tier.entries([A])[A].hits, tier.entries([A])[A].last_used) == (0, 1050.0)
    assert tier.tidy().expired == 2
    tier.close()
    tier.touch([A])


def test_on_s3_what_is_touched_goes_last(server):
    tier = server.tier(server.new_url(), clock=ticks())
    for name in "abc":
        assert tier.write(key(name), *encoded(kv()))
    server.asked.clear()
    tier.touch([A])
    assert server.asked == []
    assert list(tier.entries()) == [B, key("c"), A]


def aged(folder: Path, seconds: float) -> None:
    """All entries were written so long ago."""
    for path in (folder / CHUNKS_FOLDER).rglob("*.kv"):
        os.utime(path, (0, time.time() - seconds))


def test_what_one_process_uses_another_does_not_take_for_old(folder):
    def server():
        now = [time.time() - 5000]
        tier = opened(folder, ttl_s=7200.0, clock=lambda: now[0])
        for name in "abcd":
            assert tier.write(key(name), *encoded(kv()))
        now[0] += 5000
        assert tier.read(A, 0) is not None
        assert tier.read(key("d"), 2) is not None
        tier.touch([key("c"), key("stranger")])
        tier.close()

    asked(server)
    aged(folder, 5000)
    tidied = opened(folder, ttl_s=7200.0, clock=lambda: time.time() + 4000)
    assert set(tidied.entries()) == {A, key("c"), key("d")}
    assert tidied.tidy().expired == 1
    assert set(opened(folder).entries()) == {A, key("c"), key("d")}
    assert len(list((folder / USES_FOLDER).rglob("*.use"))) == 3
    later = opened(folder, ttl_s=7200.0, clock=lambda: time.time() + 9000)
    assert later.tidy().expired == 3


def test_what_a_server_reads_from_memory_is_kept_in_objects_by_another_process(folder):
    def server():
        now = [time.time() - 5000]
        with KVStore([MemoryTier(1 << 20, lru), opened(folder, ttl_s=7200.0, clock=lambda: now[0])]) as store:
            for name in (A, B):
                assert store.put(name, kv(), tier="objects", wait=True)
                assert store.put(name, kv(), tier="memory", wait=True)
            now[0] += 5000
            assert store.read_layers(A, 0) is not None
            assert store.flush(30)

    asked(server)
    aged(folder, 5000)
    with KVStore([opened(folder, ttl_s=7200.0, clock=lambda: time.time() + 4000)]) as store:
        store.expired = lambda entries, now_s: expired(entries, now_s + 4000, ttl_s=7200.0)
        assert bulk.gc(store)["objects"].expired == 1
        assert set(store.lookup([A, B])) == {A}


def test_of_an_entry_in_constant_use_few_uses_are_noted(server):
    url, now = server.new_url(), [time.time()]
    tier = server.tier(url, ttl_s=800.0, clock=lambda: now[0])
    assert tier.write(A, *encoded(kv()))
    server.asked.clear()
    for _ in range(50):
        now[0] += 10
        assert tier.read(A, 0) is not None
        tier.touch([A])
        tier._notes.wait(30)
    noted = [each for each in server.asked if each.method == "PUT"]
    assert len(noted) == 5
    assert all(f"/{USES_FOLDER}/" in each.path for each in noted)


def test_without_a_time_to_live_no_use_is_noted_and_none_is_listed(server):
    tier = server.tier(server.new_url(), fresh_s=0.0)
    assert tier.write(A, *encoded(kv()))
    server.asked.clear()
    assert tier.read(A, 0) is not None
    tier.touch([A])
    tier._notes.wait(30)
    tier.entries()
    assert [each.method for each in server.asked if USES_FOLDER in unquote(each.path)] == []
    assert {each.method for each in server.asked} == {"GET"}


def test_uses_of_entries_that_are_gone_are_freed(folder):
    now = [time.time() - 5000]
    tier = opened(folder, ttl_s=7200.0, clock=lambda: now[0])
    for name in (A, B):
        assert tier.write(name, *encoded(kv()))
    now[0] += 5000
    for name in (A, B):
        assert tier.read(name, 0) is not None
    tier._notes.wait(30)
    assert tier.delete([A]) == 1
    (left,) = (folder / USES_FOLDER).rglob("*.use")
    assert opened(folder).delete([B]) == 1  # who says nothing of uses knows of none
    os.utime(left, (0, time.time() - 5000))
    assert opened(folder).tidy() == Freed(orphans=1)
    assert objects(folder) == []


def test_uses_that_may_not_be_noted_are_told_once_and_not_tried_for_every_read(server, caplog):
    url, now = server.new_url(), [time.time()]
    assert server.tier(url).write(A, *encoded(kv()))
    user = server.user("s3:Get*", "s3:List*")
    with server.strict():
        tier = server.tier(url, user=user, ttl_s=800.0, clock=lambda: now[0])
        for _ in range(30):
            now[0] += 10
            assert tier.read(A, 0) is not None
            tier._notes.wait(30)
    assert tier.counts["failed"] == 3
    (told,) = warnings(caplog)
    assert "could not record uses" in told


def test_a_use_that_nobody_takes_holds_up_neither_reading_nor_closing_for_long(server):
    url = server.new_url()
    assert server.tier(url).write(A, *encoded(kv()))
    tier = server.tier(url, ttl_s=800.0, timeout_s=3.0)
    server.asked.clear()
    server.stand_still(lambda asked: asked.method == "PUT")
    for layer in range(3):
        assert tier.read(A, layer) is not None
    until(lambda: any(each.method == "PUT" for each in server.asked))
    tier.close()
    server.go_on()
