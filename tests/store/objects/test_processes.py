"""The object tier under threads and processes that read, write and die."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ragfuse.store.names import chunk_name
from tests.store.kit import child, encoded, forked, key, kv, seen_whole
from tests.store.objects.kit import A, B, hits, layers, objects, opened, weight, weight_of_one


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
    known, there = tier._index, opened(folder)
    assert over == []
    assert set(known.oldest()) == set(there.entries())
    assert known.nbytes == there.nbytes == weight(folder) <= 4 * unit
    assert (tier.counts["corrupt"], tier.counts["failed"]) == (0, 0)


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
    tier = opened(folder)
    seen = seen_whole(tier, A, wanted, lambda: any(process.is_alive() for process, _ in pairs))
    assert [pipe.recv() for _, pipe in pairs] == [0, 0]
    assert seen
    assert tier.counts["corrupt"] == 0
    assert set(opened(folder).entries()) == {A}
    assert len(objects(folder)) == 1


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
