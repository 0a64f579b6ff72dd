"""A disk that is really full: a small tmpfs, where the tests may mount one."""

import subprocess
from contextlib import suppress
from os import statvfs

import pytest

from ragfuse import Ask, Engine
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier
from ragfuse.store.deletion import gc
from tests.kits.sessions import QUESTIONS, talk
from tests.kits.store import files, key, kv

MB = 1 << 20


@pytest.fixture
def mount(tmp_path):
    """mount(bytes): a file system of that size, and a path in it."""
    mounted = []

    def make(nbytes):
        path = tmp_path / f"small{len(mounted)}"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", path],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(
                "a small file system cannot be mounted here: run the tests as root, with"
                " CAP_SYS_ADMIN"
            )
        mounted.append(path)
        return path

    try:
        yield make
    finally:
        for path in mounted:
            subprocess.run(["umount", "--lazy", path], check=True)


def filled(path):
    """The rest of the disk, taken by somebody else."""
    ballast = path / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert statvfs(path).f_bavail == 0
    return ballast


def test_a_disk_that_others_have_filled_is_read_all_the_same_and_written_again_once_there_is_room(
    mount,
):
    path = mount(3 * MB)
    with KVStore([MemoryTier(MB, lru), DiskTier(path, 1 << 30, lru)]) as store:
        store.put(key("a"), kv(1), wait=True)
        ballast = filled(path)
        assert store.put(key("b"), kv(2, n=50), wait=True)  # in memory
        assert store.tiers[1].counts["failed"] == 1
        assert store.read_layers(key("a"), 0, tier="disk") is not None
        assert [found.suffix for found in files(path)] == [".kv"]
        ballast.unlink()
        assert store.put(key("c"), kv(3), wait=True)
        gc(store)
        assert len(files(path)) == len(store.tiers[1].list()) == 2


@pytest.mark.parametrize("memory_bytes", [0, 64 * MB])
def test_sessions_over_a_full_disk_go_on_from_every_turn_and_the_trace_names_what_is_not_saved(
    mount, tiny_settings, caplog, memory_bytes
):
    path = mount(6 * MB)
    change = {
        "store": path / "store",
        "tiers": ((path / "far").as_uri(),),
        "memory_bytes": memory_bytes,
    }
    with Engine(tiny_settings.model_copy(update=change)) as engine:
        answers = talk(engine, QUESTIONS[:1])
        engine.flush()
        ballast = filled(path)
        answers += talk(engine, QUESTIONS[1:3])
        with engine.stream([("user", QUESTIONS[3])], Ask(session="one")) as stream:
            "".join(stream)
        answers.append(stream.answer)
        engine.flush()
        _, session = engine.sessions.get(engine.digest, "one")
        assert [message.text for message in session.messages][1::2] == [
            answer.text for answer in answers
        ]
        assert answers[0].trace.unsaved == ()
        for answer in answers[1:]:
            assert any("catalog" in what for what in answer.trace.unsaved), answer.trace.unsaved
        assert any(tier.counts["failed"] + tier.counts["refused"] for tier in engine.store.tiers)
        # said once for the catalog and once for the far tier, whatever is tried again
        said = {
            each.message.split(" could not")[0]
            for each in caplog.records
            if "continues without" in each.message
        }
        assert len(said) == 2
        for tier in engine.store.tiers[-2:]:
            assert tier.counts["failed"] > 0, tier.name
        ballast.unlink()
        engine.catalog._breaker.is_open = False
        (last,) = talk(engine, ["And what came then?"])
        engine.flush()
        assert last.trace.unsaved == ()
    with Engine(tiny_settings.model_copy(update=change)) as engine:
        assert len(engine.sessions.show("one").turns) == 5
