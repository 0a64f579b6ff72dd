"""Several processes on one store: killed in the middle of a write, writing at once, ending without
closing.
"""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier
from tests.kits.store import child, encoded, encoded_at, files, forked, key, kv


def stopped_while_writing(path, capacity, call):
    """A process that stands still in the middle of writing chunk "a", at `os.<call>`."""
    meta, blobs = encoded(kv())

    def work(pipe):
        tier = DiskTier(path, capacity, lru)
        real = getattr(os, call)

        def stop(*arguments):
            if call == "replace":
                real(*arguments)  # after the rename, before the row
            pipe.send("stopped")
            time.sleep(60)

        setattr(os, call, stop)
        tier.put(key("a"), meta, blobs)

    process, pipe = forked(work)
    assert pipe.recv() == "stopped"
    return process


@pytest.fixture
def unit(tmp_path):
    tier = DiskTier(tmp_path / "unit", 1 << 20, lru)
    tier.put(key("unit"), *encoded(kv()))
    nbytes = tier.nbytes
    tier.close()
    return nbytes


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_is_killed_leaves_a_whole_entry_or_none_and_no_lost_room(tmp_path, unit, call):
    path = tmp_path / "store"
    process = stopped_while_writing(path, unit, call)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [found.suffix for found in files(path)] == [".tmp" if call == "fsync" else ".kv"]
    tier = DiskTier(path, unit, lru)
    assert {entry.key for entry in tier.list()} == (set() if call == "fsync" else {key("a")})
    found = tier.get(key("a"), range(3))
    assert found is None if call == "fsync" else all(map(torch.equal, found[1:], encoded(kv())[1]))
    assert tier.put(key("b"), *encoded(kv()))
    assert (tier.nbytes, tier.counts["corrupt"]) == (unit, 0)
    tier.close()


def test_what_was_put_before_ctrl_c_is_on_disk_without_closing(tmp_path):
    code = """
        import os, signal, sys
        from ragfuse.plan.evict import lru
        from ragfuse.store import DiskTier, KVStore, MemoryTier
        from tests.kits.store import key, kv

        store = KVStore([MemoryTier(1 << 20, lru), DiskTier(sys.argv[1], 1 << 20, lru)])
        for i in range(3):
            assert store.put(key(i), kv(i))
        os.kill(os.getpid(), signal.SIGINT)
    """
    process = child(code, tmp_path)
    _, err = process.communicate(timeout=300)
    assert "KeyboardInterrupt" in err
    tier = DiskTier(tmp_path, 1 << 20, lru)
    assert {entry.key for entry in tier.list()} == {key(i) for i in range(3)}
    assert tier.counts["corrupt"] == 0
    tier.close()


def test_an_entry_that_another_process_wrote_anew_is_read_as_it_is_now(tmp_path):
    with (
        closing(DiskTier(tmp_path, 1 << 20, lru)) as mine,
        closing(DiskTier(tmp_path, 1 << 20, lru)) as other,
    ):
        for levels in (("raw",), ("raw", "int8")):
            assert other.put(key("a"), *encoded_at(kv(), *levels))
            assert all(map(torch.equal, mine.get(key("a"), range(3))[1:], encoded(kv())[1]))
        assert mine.counts["corrupt"] == 0


def write_on_and_on(path, capacity, wanted, threads):
    """Writes, reads and drops chunks, once it is told to, until it is killed."""

    def work(pipe):
        pipe.recv()
        tier = DiskTier(path, capacity, lru)
        tier.put(key(0), *wanted[0])
        pipe.send("ready")

        def go(seed):
            chance = random.Random(os.getpid() + seed)
            while True:
                name = chance.randrange(len(wanted))
                tier.put(key(name), *wanted[name])
                tier.get(key(chance.randrange(len(wanted))), range(1))
                if chance.random() < 0.1:
                    tier.delete([key(name)])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(go, range(threads)))

    return work


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_processes_killed_anywhere_leave_no_bad_entry_and_the_next_opening_no_orphan_byte(
    tmp_path, unit, kills
):
    path, capacity, chance = tmp_path / "store", 8 * unit, random.Random(3)
    wanted = [encoded(kv(i)) for i in range(12)]
    rests, read = 0, 0
    pairs = [forked(write_on_and_on(path, capacity, wanted, threads=2)) for _ in range(kills)]
    with closing(DiskTier(path, capacity, lru)) as watcher:
        for process, pipe in pairs:
            pipe.send("go")
            assert pipe.recv() == "ready"
            time.sleep(chance.uniform(0, 0.08))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            rests += sum(found.suffix == ".tmp" for found in files(path))
            for name, (_, blobs) in enumerate(wanted):
                for layer, blob in enumerate(blobs):
                    found = watcher.get(key(name), range(layer, layer + 1))
                    read += found is not None
                    assert found is None or torch.equal(found[1], blob)
            for found in files(path):
                if found.suffix == ".tmp":
                    os.utime(found, (1.0, 1.0))  # an hour later
            DiskTier(path, capacity, lru).close()
            assert all(found.suffix == ".kv" for found in files(path))
            assert sum(found.stat().st_size for found in files(path)) == watcher.nbytes <= capacity
            assert len(files(path)) == len(watcher.list())
    assert read > 0
    assert rests > 0 or kills < 100


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_four_processes_of_eight_threads_keep_the_capacity_and_every_byte(tmp_path, unit, rounds):
    path, capacity = tmp_path / "store", 6 * unit + 10
    wanted = [encoded(kv(i)) for i in range(20)]

    def work(pipe, seed):
        tier = DiskTier(path, capacity, lru)

        def go(thread):
            chance, kept, read, wrong = random.Random(seed * 8 + thread), 0, 0, 0
            for _ in range(rounds):
                name, layer = chance.randrange(20), chance.randrange(3)
                kept += tier.put(key(name), *wanted[name])
                for other in (name, chance.randrange(20)):
                    found = tier.get(key(other), range(layer, layer + 1))
                    read += found is not None
                    wrong += found is not None and not torch.equal(
                        found[1], wanted[other][1][layer]
                    )
            return kept, read, wrong

        with ThreadPoolExecutor(8) as pool:
            sums = [sum(column) for column in zip(*pool.map(go, range(8)), strict=True)]
        tier.close()
        pipe.send((*sums, tier.counts["corrupt"], tier.counts["failed"]))

    pairs = [forked(lambda pipe, seed=seed: work(pipe, seed)) for seed in range(4)]
    tier = DiskTier(path, capacity, lru)
    while any(process.is_alive() for process, _ in pairs):
        assert tier.nbytes <= capacity
        time.sleep(0.001)
    kept, read, *trouble = zip(*(pipe.recv() for _, pipe in pairs), strict=True)
    assert all(kept)
    assert any(read)
    assert trouble == [(0,) * 4] * 3
    assert sum(found.stat().st_size for found in files(path)) == tier.nbytes <= capacity
    assert len(files(path)) == len(tier.list()) > 3
    tier.close()
