"""What the object tier learns by listing, and that nobody waits for it."""

import os
import shutil
import threading
from pathlib import Path

from ragfuse.store import s3
from ragfuse.store.names import CHUNKS_FOLDER, chunk_name
from tests.store.kit import encoded, key, kv
from tests.store.objects.kit import A, B, impatient, is_listing, opened, weight, weight_of_one
from tests.store.redis_server import until


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
    (folder / CHUNKS_FOLDER / "stranger").write_text("mine")
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
    tier = server.tier(server.new_url(), cool_down_s=0.0, fresh_s=0.0)
    for name in (A, B):
        assert tier.write(name, *encoded(kv()))
    server.stand_still(lambda asked: is_listing(asked) and "continuation-token" in asked.path)
    with impatient(tier):
        assert tier.entries() == {}
    server.go_on()
    assert tier.read(A, 0) is not None
    assert set(tier.entries([A, B])) == set(tier.entries()) == {A, B}


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
