"""The object tier against damaged, foreign and vanished objects, servers that stop, other processes, odd URLs."""

import importlib.util
import logging
import os
import random
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from ragfuse.errors import StoreError
from ragfuse.plan.evict import expired, lru
from ragfuse.store import KVStore, MemoryTier, names, s3
from ragfuse.store.chunkfile import Header
from ragfuse.store.names import CHUNKS, USES, chunk_name, pin_name
from ragfuse.store.objects import ObjectTier
from ragfuse.store.tier import Freed
from tests.store.kit import asked, child, encoded, forked, key, kv, ticks
from tests.store.redis_server import free_port, until
from tests.store.s3_server import S3Server, shared
from tests.store.slow_link import SlowLink, large
from tests.store.test_disk import DAMAGE, flipped

A, B = key("a"), key("b")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def tier(folder) -> ObjectTier:
    """A tier in files that holds A."""
    tier = opened(folder, clock=ticks())
    assert tier.write(A, *encoded(kv()))
    return tier


@pytest.fixture
def server() -> S3Server:
    """A server of the test's own, to be stopped."""
    server = S3Server()
    yield server
    server.stop()


def opened(folder: Path, capacity: int = 1 << 20, **options) -> ObjectTier:
    """A tier that has never seen what is in the folder, as in another process."""
    return ObjectTier(f"file://{folder}", capacity, lru, **{"fresh_s": 0.0, **options})


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def weight(folder: Path) -> int:
    return sum(path.stat().st_size for path in objects(folder))


def layers(tier: ObjectTier, name=A, n: int = 3) -> list[torch.Tensor | None]:
    found = [tier.read(name, i) for i in range(n)]
    return [each and each[1] for each in found]


def hits(seen: list[torch.Tensor | None], wanted) -> list[bool]:
    """Which layers were read; those that were are right."""
    assert all(got is None or torch.equal(got, blob) for got, blob in zip(seen, wanted, strict=True))
    return [got is not None for got in seen]


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# damage


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_object_is_dropped_counted_and_named(tier, folder, damage, caplog):
    (path,) = objects(folder)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "ragfuse.store"):
        other = opened(folder)
        hits(layers(other), encoded(kv())[1])
        assert other.entries() == {}  # what is wrong with padding alone is noticed by a listing
    assert str(A) in caplog.text
    assert other.counts["corrupt"] == 1
    assert objects(folder) == []
    assert other.nbytes == 0
    assert other.write(A, *encoded(kv()))
    assert other.read(A, 0) is not None


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_look_up_gives_an_entry_if_its_header_is_whole(tier, folder, damage):
    (path,) = objects(folder)
    path.write_bytes(damage(path.read_bytes()))
    wanted = is_header_of(A, path.read_bytes())
    other = opened(folder)
    assert (A in other.entries([A])) is wanted
    assert (other.counts["corrupt"], path.exists()) == (int(not wanted), wanted)


def is_header_of(name, data: bytes) -> bool:
    try:
        return Header.parse(data).key == name
    except ValueError:
        return False


@pytest.mark.parametrize("n", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_flipped_bytes_and_truncations_anywhere_are_detected(folder, n):
    chosen, (meta, blobs) = random.Random(n), encoded(kv())
    tier = opened(folder)
    assert tier.write(A, meta, blobs)
    (path,) = objects(folder)
    whole = path.read_bytes()
    for turn in range(n):
        at = chosen.randrange(len(whole))
        path.write_bytes(flipped(whole, at) if turn % 2 else whole[:at])
        other = opened(folder)
        seen = hits(layers(other), blobs)
        assert not all(seen)
        assert other.counts["corrupt"] == 1
        assert not path.exists()


def test_damage_of_an_object_that_is_known_is_noticed_too(tier, folder):
    assert all(hits(layers(tier), encoded(kv())[1]))
    (path,) = objects(folder)
    path.write_bytes(path.read_bytes()[:-70])
    assert tier.read(A, 0) is not None
    assert tier.read(A, 2) is None
    assert tier.counts["corrupt"] == 1
    assert tier.nbytes == 0


def test_without_verify_no_checksum_is_looked_at(tier, folder):
    (path,) = objects(folder)
    path.write_bytes(flipped(path.read_bytes(), path.stat().st_size - 64))
    assert opened(folder, verify=False).read(A, 2) is not None
    assert opened(folder).read(A, 2) is None


def test_a_truncated_object_on_s3_is_dropped_wherever_it_ends():
    url = shared().new_url()
    tier, path = shared().tier(url), url.removeprefix(f"s3://{shared().bucket}/") + "/" + chunk_name(A)
    assert tier.write(A, *encoded(kv()))
    whole = shared().client.get_object(Bucket=shared().bucket, Key=path)["Body"].read()
    for end in (0, 20, 300, 769, len(whole) - 100):
        tier.write(A, *encoded(kv()))
        before = tier.counts["corrupt"]
        shared().client.put_object(Bucket=shared().bucket, Key=path, Body=whole[:end])
        for seen in (tier, shared().tier(url)):  # one that remembers the header, one that does not
            hits(layers(seen), encoded(kv())[1])
            assert A not in seen.entries([A])
        assert tier.counts["corrupt"] == before + 1


def test_an_object_that_was_deleted_by_another_is_a_miss_and_no_fault(tier, folder):
    objects(folder)[0].unlink()
    assert A in tier.entries([A])
    assert tier.read(A, 0) is None
    assert tier.entries([A]) == tier.entries() == {}
    assert (tier.counts["corrupt"], tier.counts["failed"], tier.nbytes) == (0, 0, 0)


def test_an_object_that_was_written_anew_by_another_is_read_as_it_is_now(tier, folder):
    assert tier.read(A, 0) is not None
    meta, blobs = encoded(kv(8))
    assert opened(folder).write(A, meta, blobs)
    assert hits(layers(tier), blobs) == [True] * 3
    assert tier.counts["corrupt"] == 0


def test_a_folder_removed_behind_our_back_comes_back(tier, folder):
    shutil.rmtree(folder)
    assert tier.read(A, 0) is None
    assert tier.write(A, *encoded(kv()))
    assert tier.read(A, 0) is not None


def test_a_write_that_fails_keeps_nothing_and_gives_room_back(tier, folder, caplog):
    before = tier.nbytes
    path = folder / Path(chunk_name(key("x", "model y"))).parent
    path.write_text("in the way")
    assert not tier.write(key("x", "model y"), *encoded(kv()))
    assert tier.counts["failed"] == 1
    assert str(key("x", "model y")) in caplog.text
    assert tier.nbytes == before
    assert not tier.breaker.is_open
    assert tier.read(A, 0) is not None


@pytest.mark.parametrize("n", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_what_is_known_is_what_is_there_after_threads_wrote_deleted_evicted_and_listed(folder, n):
    unit = weight_of_one(folder.with_name("one"))
    tier, over = opened(folder, 4 * unit), []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(n):
            name = key(rng.randrange(7))
            rng.choice([write, write, look, remove])(name)
            if tier.nbytes > tier.capacity:
                over.append(tier.nbytes)

    def write(name):
        tier.write(name, *encoded(kv()))

    def remove(name):
        tier.delete([name])

    def look(name):
        tier.read(name, 1)
        tier.entries([name])
        tier.entries()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    known, there = tier._catalogue, opened(folder)
    assert over == []
    assert set(known.oldest()) == set(there.entries())
    assert known.nbytes == there.nbytes == weight(folder) <= 4 * unit
    assert (tier.counts["corrupt"], tier.counts["failed"]) == (0, 0)


# little is allowed


def test_a_bucket_that_may_only_be_read_is_read_and_says_once_what_it_does_not_take(server, caplog):
    url = server.new_url()
    for i in range(3):
        assert server.tier(url).write(key(i), *encoded(kv(i)))
    user = server.user("s3:Get*", "s3:List*")
    with server.strict(), caplog.at_level(logging.WARNING, "ragfuse.store"):
        tier = server.tier(url, user=user, cool_down_s=3600.0)
        assert [tier.write(key(i), *encoded(kv())) for i in range(2, 7)] == [False] * 5
        tier.pin([key(0)], True)
        assert tier.delete([key(1)]) == 0
        assert set(tier.entries()) == {key(i) for i in range(3)}
        for i in range(3):
            assert all(hits(layers(tier, key(i)), encoded(kv(i))[1]))
        assert not tier.breaker.is_open
    assert [text.split("could not ")[1].split()[0] for text in warnings(caplog)] == ["write", "pin", "delete"]
    assert "Denied" in caplog.text
    assert tier.counts["failed"] == 7
    assert tier.nbytes == server.tier(url).nbytes


def test_one_bad_object_that_cannot_be_deleted_hides_no_good_one(server, caplog):
    url = server.new_url()
    for name in (A, B):
        assert server.tier(url).write(name, *encoded(kv()))
    path = url.removeprefix(f"s3://{server.bucket}/") + "/" + chunk_name(A)
    user = server.user("s3:Get*", "s3:List*")
    for body in (b"", b"nonsense" * 200):
        server.client.put_object(Bucket=server.bucket, Key=path, Body=body)
        with server.strict():
            tier = server.tier(url, user=user)
            assert set(tier.entries([A, B])) == {B}
            assert tier.read(A, 0) is None
            assert tier.read(B, 0) is not None
            assert tier.counts["corrupt"] > 0
            assert set(tier.entries()) == {B}


def test_what_is_left_lying_about_and_cannot_be_deleted_spoils_no_listing(server, caplog):
    url = server.new_url()
    assert server.tier(url).write(A, *encoded(kv()))
    path = url.removeprefix(f"s3://{server.bucket}/") + "/" + pin_name(B)
    server.client.put_object(Bucket=server.bucket, Key=path, Body=b"")
    user = server.user("s3:Get*", "s3:List*")
    with server.strict(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_ABANDONED_S", -60.0)
        tier = server.tier(url, user=user)
        assert set(tier.entries()) == {A}
        assert tier.tidy() == Freed()
    assert "Could not delete what is left" in caplog.text


def test_a_bucket_deleted_behind_our_back_is_misses_until_it_is_there_again(server, caplog):
    url = server.new_url()
    tier = server.tier(url, fresh_s=0.0)
    assert tier.write(A, *encoded(kv()))
    for each in server.client.list_objects_v2(Bucket=server.bucket)["Contents"]:
        server.client.delete_object(Bucket=server.bucket, Key=each["Key"])
    server.client.delete_bucket(Bucket=server.bucket)
    assert tier.read(A, 0) is None
    assert (tier.entries([A, B]), tier.entries()) == ({}, {})
    assert not tier.write(B, *encoded(kv()))
    assert not tier.breaker.is_open
    assert "bucket does not exist" in caplog.text
    server.client.create_bucket(Bucket=server.bucket)
    assert tier.write(B, *encoded(kv()))
    assert tier.read(B, 0) is not None


def test_two_processes_that_write_one_chunk_at_once_leave_one_of_both_whole(folder):
    wanted = [encoded(kv(i)) for i in range(2)]

    def work(pipe, i):
        tier = opened(folder)
        pipe.recv()
        for _ in range(60):
            tier.write(A, *wanted[i])
        pipe.send(tier.counts["failed"])

    pairs = [forked(lambda pipe, i=i: work(pipe, i)) for i in range(2)]
    for _, pipe in pairs:
        pipe.send("go")
    tier, seen = opened(folder), set()
    while any(process.is_alive() for process, _ in pairs):
        found = tier.read(A, 0, 3)
        if found is not None:
            (which,) = [i for i in range(2) if all(map(torch.equal, found[1:], wanted[i][1]))]
            seen.add(which)
    assert [pipe.recv() for _, pipe in pairs] == [0, 0]
    assert seen
    assert tier.counts["corrupt"] == 0
    assert set(opened(folder).entries()) == {A}
    assert len(objects(folder)) == 1


# requests


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 1), (0, 3), (1, 2)])
def test_layers_of_a_known_object_are_one_range_read_of_their_bytes_alone(first, count):
    server = shared()
    tier, (meta, blobs) = server.tier(server.new_url()), encoded(kv(n=500))
    assert tier.write(A, meta, blobs)
    server.asked.clear()
    assert tier.read(A, first, count) is not None
    (request,) = server.asked
    begin, end = map(int, request.range.removeprefix("bytes=").split("-"))
    assert request.method == "GET"
    padding = 64 * count
    assert 0 <= end + 1 - begin - sum(blob.numel() for blob in blobs[first : first + count]) <= padding


def test_an_object_that_was_looked_up_by_another_process_costs_one_request_each_way():
    server, url = shared(), shared().new_url()
    assert server.tier(url).write(A, *encoded(kv(n=500)))
    tier = server.tier(url)
    server.asked.clear()
    assert A in tier.entries([A])
    assert tier.read(A, 0) is not None
    assert tier.entries([A])[A].hits == 1
    assert [request.method for request in server.asked] == ["GET", "GET"]


def test_an_unknown_object_is_header_and_layers_by_two_requests_and_by_one_where_it_is_small():
    server, url = shared(), shared().new_url()
    for n, requests in ((500, 2), (5, 1)):
        assert server.tier(url).write(A, *encoded(kv(n=n)))
        tier = server.tier(url)
        server.asked.clear()
        assert tier.read(A, 0) is not None
        assert len(server.asked) == requests


def test_a_header_longer_than_most_is_read_whole_and_the_next_one_at_once():
    server, url = shared(), shared().new_url()
    chunk, writer = kv(n_layers=120), server.tier(url, 1 << 24)
    assert writer.write(A, *encoded(chunk))
    assert writer.write(B, *encoded(chunk))
    tier = server.tier(url)
    for name, requests in ((A, 2), (B, 1)):
        server.asked.clear()
        assert tier.entries([name])[name].n_layers == 120
        assert len(server.asked) == requests
    assert tier.read(B, 119) is not None


def test_a_look_up_of_six_chunks_is_one_round_trip(server):
    url = server.new_url()
    assert server.tier(url).write(A, *encoded(kv()))
    tier, found = server.tier(url, timeout_s=30.0), []
    server.asked.clear()
    server.stand_still()
    thread = threading.Thread(target=lambda: found.append(tier.entries([A, *map(key, range(5))])))
    thread.start()
    until(lambda: len(server.asked) == 6)  # all asked before any is answered
    server.go_on()
    thread.join()
    assert set(found[0]) == {A}


def test_known_entries_are_given_without_asking():
    server = shared()
    tier = server.tier(server.new_url())
    assert tier.write(A, *encoded(kv()))
    server.asked.clear()
    assert set(tier.entries([A])) == {A}
    assert server.asked == []


# servers


def test_a_server_that_stops_costs_one_attempt_and_then_nothing(server, caplog):
    tier = server.tier(server.new_url(), cool_down_s=3600.0)
    for i in range(6):
        assert tier.write(key(i), *encoded(kv()))
    server.stop()
    before = tier.breaker.attempts
    with caplog.at_level(logging.WARNING, "ragfuse.store"):
        assert [tier.read(key(i), layer) for i in range(6) for layer in range(3)] == [None] * 18
        assert tier.entries([B]) == {}
        assert not tier.write(B, *encoded(kv()))
        assert tier.delete([key(0)]) == 0
    assert tier.breaker.attempts == before + 1
    # the read that found out, and the write and the delete that were left out
    assert (tier.counts["failed"], tier.counts["corrupt"]) == (3, 0)
    assert len(warnings(caplog)) == 1
    server.start()


def test_a_server_that_comes_back_is_used_again(server):
    tier = server.tier(server.new_url(), cool_down_s=0.0)
    assert tier.write(A, *encoded(kv()))
    server.stop()
    assert tier.read(A, 0) is None
    assert not tier.write(B, *encoded(kv()))
    server.start()
    assert tier.read(A, 0) is not None
    assert tier.write(B, *encoded(kv()))
    assert set(tier.entries()) == {A, B}
    assert not tier.breaker.is_open


def test_what_is_known_without_asking_says_nothing_of_a_server_that_is_down(server, caplog):
    tier = server.tier(server.new_url(), cool_down_s=0.0)
    assert tier.write(A, *encoded(kv()))
    server.stop()
    caplog.set_level(logging.INFO, "ragfuse.store")
    caplog.clear()
    for _ in range(3):
        assert tier.read(A, 0) is None
        attempts = tier.breaker.attempts
        tier.entries([A])
        assert (tier.breaker.is_open, tier.breaker.attempts) == (True, attempts)
    assert [record.levelname for record in caplog.records if record.name == "ragfuse.store"] == ["WARNING"]
    server.start()
    assert tier.read(A, 0) is not None
    assert not tier.breaker.is_open


def test_headers_that_nobody_gives_are_a_failure_and_no_answer(server):
    url = server.new_url()
    tier = server.tier(url, cool_down_s=0.0)
    server.stop()
    assert tier.entries([A, B]) == {}
    assert tier.breaker.is_open
    assert tier.entries([A, B]) == {}
    assert tier.breaker.is_open
    server.start()


def test_a_server_that_stands_still_is_a_miss_in_time(server):
    tier = server.tier(server.new_url(), timeout_s=0.2, cool_down_s=3600.0)
    assert tier.write(A, *encoded(kv()))
    before = len(server.asked)
    server.stand_still()
    assert [tier.read(A, layer) for layer in range(3)] == [None] * 3
    assert len(server.asked) == before + 1
    assert tier.breaker.is_open
    server.go_on()


def test_what_takes_longer_than_the_timeout_over_a_slow_link_is_written_and_read(server):
    url, link = server.new_url(), SlowLink(server.port, 6e6)
    tier = server.tier(url, 1 << 30, port=link.port, timeout_s=0.3)
    meta, blobs = large(6 << 20, 1)
    assert tier.write(A, meta, blobs)
    assert torch.equal(tier.read(A, 0)[1], blobs[0])
    assert (tier.counts["failed"], tier.breaker.is_open) == (0, False)
    link.close()


def test_a_server_that_is_not_there_at_opening_is_no_error(server, caplog):
    url = server.new_url()
    server.stop()
    with caplog.at_level(logging.WARNING, "ragfuse.store"):
        tier = server.tier(url, cool_down_s=0.0)
    assert len(warnings(caplog)) == 1
    assert (tier.nbytes, tier.entries(), tier.read(A, 0), tier.write(A, *encoded(kv()))) == (0, {}, None, False)
    server.start()
    assert tier.write(A, *encoded(kv()))
    assert tier.read(A, 0) is not None


def test_an_object_whose_put_was_not_answered_counts_once_it_is_seen(server):
    tier = server.tier(server.new_url(), timeout_s=0.2, cool_down_s=0.0)
    assert tier.write(B, *encoded(kv()))
    unit = tier.nbytes
    server.stand_still()
    assert not tier.write(A, *encoded(kv()))
    server.go_on()
    until(lambda: A in tier.entries([A]))
    assert tier.nbytes == 2 * unit


# other processes


def test_two_processes_see_each_others_entries(tier, folder):
    code = """
    import sys
    from ragfuse.plan.evict import lru
    from ragfuse.store.objects import ObjectTier
    from tests.store.kit import encoded, key, kv
    tier = ObjectTier(sys.argv[1], 1 << 20, lru)
    print(key("a") in tier.entries([key("a")]), tier.read(key("a"), 1) is not None)
    print(tier.write(key("b"), *encoded(kv(3))), tier.delete([key("a")]))
    """
    out, err = child(code, f"file://{folder}").communicate(timeout=120)
    assert out.split() == ["True", "True", "True", "1"], err
    assert torch.equal(tier.read(B, 0)[1], encoded(kv(3))[1][0])
    assert tier.read(A, 0) is None
    assert set(tier.entries()) == {B}


def test_tiers_that_list_before_writing_keep_one_capacity_together(folder):
    unit = weight_of_one(folder.with_name("one"))
    tiers = [opened(folder, 3 * unit) for _ in range(2)]
    for i in range(8):
        assert tiers[i % 2].write(key(i), *encoded(kv()))
        assert weight(folder) <= 3 * unit
    assert set(tiers[0].entries()) == set(tiers[1].entries()) == {key(5), key(6), key(7)}


# listings


def is_listing(asked) -> bool:
    return "list-type=2" in asked.path and f"{CHUNKS}/" in unquote(asked.path)


def test_a_listing_is_read_page_by_page(server, monkeypatch):
    monkeypatch.setattr(s3, "_PAGE_OBJECTS", 3)
    url = server.new_url()
    tier = server.tier(url)
    for i in range(10):
        assert tier.write(key(i), *encoded(kv()))
    other = server.tier(url)
    server.asked.clear()
    assert set(other.entries()) == {key(i) for i in range(10)}
    assert len(list(filter(is_listing, server.asked))) == 4


def test_what_lies_in_several_folders_and_beside_ours_is_listed(folder, tmp_path):
    wanted = {key(i, model) for i in range(3) for model in ("x", "y")}
    tier = opened(folder)
    for each in wanted:
        assert tier.write(each, *encoded(kv()))
    (folder / "stranger").mkdir()
    (folder / CHUNKS / "stranger").write_text("mine")
    assert set(opened(folder).entries()) == wanted
    shutil.rmtree(folder / Path(chunk_name(key(0, "x"))).parent)
    assert set(tier.entries()) == {each for each in wanted if each.model == key(0, "y").model}


def test_while_one_lists_others_look_up_read_weigh_and_write(server):
    tier = server.tier(server.new_url(), timeout_s=30.0, fresh_s=0.0)
    assert tier.write(A, *encoded(kv()))
    unit, found = tier.nbytes, []
    server.asked.clear()
    server.stand_still(is_listing)
    thread = threading.Thread(target=lambda: found.append(tier.entries()))
    thread.start()
    until(lambda: any(map(is_listing, server.asked)))
    assert tier.nbytes == unit
    assert set(tier.entries([A, key("x")])) == {A}
    assert tier.read(A, 0) is not None
    assert tier.write(B, *encoded(kv()))
    assert tier.delete([A]) == 1
    assert found == []
    server.go_on()
    thread.join()
    assert set(found[0]) == {B}
    assert tier.nbytes == unit


def test_the_first_listing_keeps_nobody_from_asking_for_the_weight(server):
    url = server.new_url()
    assert server.tier(url).write(A, *encoded(kv()))
    tier = server.tier(url, timeout_s=30.0)
    server.asked.clear()
    server.stand_still(is_listing)
    thread = threading.Thread(target=tier.entries)
    thread.start()
    until(lambda: any(map(is_listing, server.asked)))
    assert tier.nbytes == 0
    assert tier.read(A, 0) is not None
    server.go_on()
    thread.join()
    assert tier.nbytes > 0


def test_a_listing_that_breaks_off_forgets_nothing(server, monkeypatch):
    monkeypatch.setattr(s3, "_PAGE_OBJECTS", 1)
    tier = server.tier(server.new_url(), timeout_s=0.3, cool_down_s=0.0, fresh_s=0.0)
    for name in (A, B):
        assert tier.write(name, *encoded(kv()))
    server.stand_still(lambda asked: is_listing(asked) and "continuation-token" in asked.path)
    assert tier.entries() == {}
    server.go_on()
    assert tier.read(A, 0) is not None
    assert set(tier.entries([A, B])) == set(tier.entries()) == {A, B}


def weight_of_one(folder: Path) -> int:
    tier = opened(folder)
    assert tier.write(A, *encoded(kv()))
    return tier.nbytes


def test_an_old_listing_is_good_enough_until_it_is_not_fresh_any_more(folder):
    tier, other = opened(folder, fresh_s=3600.0), opened(folder)
    assert tier.entries() == {}
    assert other.write(A, *encoded(kv()))
    assert tier.entries() == {}
    assert set(tier.entries([A])) == {A}


def test_after_a_restart_the_oldest_object_goes_first(folder):
    unit = weight_of_one(folder.with_name("one"))
    first = opened(folder)
    for name in "abc":
        assert first.write(key(name), *encoded(kv()))
        os.utime(folder / chunk_name(key(name)), (0, 1e9 - 1000 * "bac".index(name)))
    tier = opened(folder, 3 * unit)
    assert tier.write(key("d"), *encoded(kv()))
    assert set(tier.entries()) == {key(name) for name in "abd"}


def test_a_smaller_capacity_is_kept_from_the_first_write_on(folder):
    first = opened(folder)
    for name in "abcd":
        assert first.write(key(name), *encoded(kv()))
    unit = first.nbytes // 4
    tier = opened(folder, 2 * unit)
    assert tier.write(key("e"), *encoded(kv()))
    assert weight(folder) == tier.nbytes == 2 * unit


def test_a_pin_outlives_the_process_and_binds_the_others(folder):
    unit = weight_of_one(folder.with_name("one"))
    first = opened(folder, 2 * unit)
    assert first.write(A, *encoded(kv()))
    assert first.write(B, *encoded(kv()))
    second = opened(folder, 2 * unit)
    first.pin([A, key("stranger")], True)
    assert second.write(key("c"), *encoded(kv()))
    assert set(second.entries()) == {A, key("c")}
    third = opened(folder, 2 * unit, fresh_s=3600.0)
    assert third.entries([A])[A].pinned
    third.pin([A], False)
    assert not opened(folder).entries()[A].pinned
    first.pin([A], True)
    assert third.delete([A]) == 1
    assert [path.name for path in objects(folder)] == [Path(chunk_name(key("c"))).name]


def test_a_tier_goes_on_in_a_forked_process(tier):
    assert asked(lambda: (tier.read(A, 0) is not None, tier.write(B, *encoded(kv())))) == (True, True)
    assert set(tier.entries()) == {A, B}


def test_a_tier_on_s3_goes_on_in_a_forked_process():
    tier = shared().tier(shared().new_url())
    assert tier.write(A, *encoded(kv()))

    def work():
        with shared().reachable():
            return tier.read(A, 0) is not None, tier.write(B, *encoded(kv()))

    assert asked(work) == (True, True)
    assert set(tier.entries([A, B])) == {A, B}
    assert tier.read(A, 0) is not None


@pytest.mark.parametrize("n", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_process_killed_while_it_writes_leaves_no_bad_entry(folder, n):
    blobs = [encoded(kv(seed, n=200)) for seed in range(4)]

    def work(pipe):
        tier = opened(folder)
        pipe.send("ready")
        for turn in range(1 << 30):
            tier.write(key(turn % 4), *blobs[turn % 4])

    rng = random.Random(0)
    for _ in range(n):
        process, pipe = forked(work)
        pipe.recv()
        time.sleep(rng.uniform(0, 0.02))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    tier = opened(folder)
    for seed, (_, wanted) in enumerate(blobs):
        assert len(set(hits(layers(tier, key(seed)), wanted))) == 1
    assert tier.entries()
    assert tier.counts["corrupt"] == 0
    for path in objects(folder):
        os.utime(path, (0, 1e9))
    tier.tidy()
    assert weight(folder) == tier.nbytes == sum(entry.nbytes for entry in tier.entries().values())


# tidying, and growing old


def test_what_dead_writers_left_long_ago_is_freed_and_the_rest_stays(tier, folder):
    (path,) = objects(folder)
    old, young = path.with_name(path.name + ".x.1.tmp"), path.with_name(path.name + ".x.2.tmp")
    notes, orphan = path.with_name("notes.x.1.tmp"), folder / pin_name(B)
    pin = orphan.with_name(orphan.name + ".x.3.tmp")
    orphan.parent.mkdir(parents=True)
    for left in (old, young, notes, orphan, pin):
        left.write_bytes(b"half")
    for left in (old, notes, orphan, pin):
        os.utime(left, (0, 1e9))
    assert tier.tidy() == Freed(orphans=3, nbytes=12)
    assert objects(folder) == sorted([path, young, notes])
    assert tier.tidy() == Freed()
    assert set(tier.entries()) == {A}


def uploads(server) -> list[str]:
    return sorted(each["Key"] for each in server.client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", []))


def cut_off(server, url) -> int:
    """A process that is killed when all parts of an object are there, and it only has to be said; their bytes."""
    before = len(server.asked)

    def work(pipe):
        from s3fs import S3FileSystem

        S3FileSystem._pipe_file.__defaults__ = (5 << 20, *S3FileSystem._pipe_file.__defaults__[1:])  # parts of 5 MiB
        server.tier(url, 1 << 30, timeout_s=60.0).write(A, *large(6 << 20))

    server.stand_still(lambda asked: asked.method == "POST" and "uploadId" in asked.path, lose=True)
    process, _ = forked(work)
    until(lambda: any("uploadId" in asked.path and asked.method == "POST" for asked in server.asked[before:]))
    process.kill()
    process.join()
    server.go_on()
    (upload,) = server.client.list_multipart_uploads(Bucket=server.bucket)["Uploads"]
    which = {"Bucket": server.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
    return sum(part["Size"] for part in server.client.list_parts(**which)["Parts"])


def test_an_upload_that_was_cut_off_is_ended_once_it_is_old_and_others_are_left_alone(server, monkeypatch):
    url = server.new_url()
    nbytes = cut_off(server, url)
    assert nbytes > 12 << 20
    ours = uploads(server)
    others = [f"{Path(ours[0]).parent}/notes", ours[0].replace("folder", "other"), "loose"]
    for name in others:
        server.client.create_multipart_upload(Bucket=server.bucket, Key=name)
    tier = server.tier(url)
    assert tier.read(A, 0) is None
    with monkeypatch.context() as patch:
        patch.setattr(names, "_CUT_OFF_S", 1e10)  # moto says of every upload that it is of 2010
        assert tier.tidy() == Freed()
        assert uploads(server) == sorted([*ours, *others])
    assert tier.tidy() == Freed(orphans=1, nbytes=nbytes)
    assert uploads(server) == sorted(others)
    assert tier.tidy() == Freed()


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
    for path in (folder / CHUNKS).rglob("*.kv"):
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
    assert len(list((folder / USES).rglob("*.use"))) == 3
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
        assert store.gc()["objects"].expired == 1
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
    assert all(f"/{USES}/" in each.path for each in noted)


def test_without_a_time_to_live_no_use_is_noted_and_none_is_listed(server):
    tier = server.tier(server.new_url(), fresh_s=0.0)
    assert tier.write(A, *encoded(kv()))
    server.asked.clear()
    assert tier.read(A, 0) is not None
    tier.touch([A])
    tier._notes.wait(30)
    tier.entries()
    assert [each.method for each in server.asked if USES in unquote(each.path)] == []
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
    (left,) = (folder / USES).rglob("*.use")
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
    assert "could not note uses" in told


def test_a_use_that_nobody_takes_holds_up_neither_reading_nor_closing_for_long(server):
    url = server.new_url()
    assert server.tier(url).write(A, *encoded(kv()))
    tier = server.tier(url, ttl_s=800.0, timeout_s=0.3)
    server.asked.clear()
    server.stand_still(lambda asked: asked.method == "PUT")
    for layer in range(3):
        assert tier.read(A, layer) is not None
    until(lambda: any(each.method == "PUT" for each in server.asked))
    tier.close()
    server.go_on()


# opening


def refused(url: str, **options) -> str:
    with pytest.raises(StoreError) as caught:
        ObjectTier(url, 1 << 20, lru, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "wanted" in message
    assert "found" in message
    return message


def test_an_unknown_scheme_is_refused_and_known_ones_are_named():
    for url in ("gopher://host/folder", "folder"):
        message = refused(url)
        assert url in message
        assert "s3://" in message


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_driver_that_is_not_installed_is_named():
    assert "pip install gcsfs" in refused("gs://bucket/folder")


def test_a_file_where_a_folder_is_wanted_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "a file" in refused(f"file://{tmp_path}/file")
    assert "a file" in refused(f"file://{tmp_path}/file/below")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_object_where_a_folder_is_wanted_is_refused():
    server = shared()
    server.client.put_object(Bucket=server.bucket, Key="thing", Body=b"mine")
    with server.reachable():
        assert "a file" in refused(f"s3://{server.bucket}/thing")


def test_a_folder_without_permission_is_refused(tmp_path):
    closed, inside = tmp_path / "closed", tmp_path / "closed" / "new"
    closed.mkdir(mode=0o500)

    def work():
        if os.geteuid() == 0:
            os.setuid(65534)  # root may write everywhere
        return [refused(f"file://{path}") for path in (closed, inside)]

    for message in asked(work):
        assert "permission" in message.lower()


def test_a_bucket_that_does_not_exist_is_refused_and_not_made():
    with shared().reachable():
        assert "bucket" in refused("s3://no-such-bucket/folder")
        assert "bucket" in refused("s3://no-such-bucket")
        assert "Invalid bucket name" in refused("s3://No_Bucket!/folder")
    assert "no-such-bucket" not in [bucket["Name"] for bucket in shared().client.list_buckets()["Buckets"]]


def test_a_whole_bucket_is_a_folder_too():
    shared().client.create_bucket(Bucket="whole")
    tier = shared().tier("s3://whole")
    assert tier.write(A, *encoded(kv()))
    assert set(tier.entries()) == {A}
    assert shared().tier("s3://whole").read(A, 0) is not None


def test_missing_credentials_are_named_with_what_to_set(monkeypatch, tmp_path):
    with shared().reachable():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        assert "AWS_ACCESS_KEY_ID" in refused(f"s3://{shared().bucket}/folder")
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        assert "nobody" in refused(f"s3://{shared().bucket}/folder")


def test_secrets_are_neither_logged_nor_told(caplog):
    port = free_port()
    with caplog.at_level(logging.DEBUG, "ragfuse"):
        tier = ObjectTier(f"ftp://me:hunter2@127.0.0.1:{port}/folder", 1 << 20, lru)
        assert tier.read(A, 0) is None
        assert not tier.write(A, *encoded(kv()))
    assert caplog.records
    assert "hunter2" not in caplog.text
    assert "hunter2" not in refused("gopher://me:hunter2@host/folder")


def test_a_host_that_accepts_and_says_nothing_is_no_error(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent, shared().reachable(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tier = ObjectTier("s3://bucket/folder", 1 << 20, lru, timeout_s=0.2)
    assert tier.breaker.is_open
    assert len(warnings(caplog)) == 1


def test_a_new_folder_is_for_this_user_alone(tier, folder):
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_key_that_cannot_be_written_down_is_refused(tier):
    with pytest.raises(ValueError, match="key"):
        tier.write(type(A)("a.b", "c"), *encoded(kv()))


def test_keys_with_odd_characters_find_their_way_back(folder):
    odd = type(A)("mo/del", "/etc/x y", "~cont?ext#", "lay%2Fout*")
    assert opened(folder).write(odd, *encoded(kv()))
    tier = opened(folder)
    assert set(tier.entries()) == {odd}
    assert tier.read(odd, 0) is not None
    assert len(objects(folder)) == 1


def test_a_closed_tier_misses_and_closes_twice(tier):
    tier.close()
    tier.close()
    assert tier.read(A, 0) is None
    assert tier.entries() == {}
    assert not tier.write(A, *encoded(kv()))
    assert tier.nbytes == 0
