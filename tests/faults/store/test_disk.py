"""The disk tier against damaged, foreign and vanished files, odd folders, full media and
restarts.
"""

import os
import resource
import shutil
import sqlite3
from contextlib import closing

import pytest
import torch

from ragfuse.errors import StoreError
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier
from ragfuse.types.keys import FORMAT_VERSION
from tests.kits.store import asked, encoded, files, key, kv, ticks

A = key("a")


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20, lru, clock=ticks())
    assert tier.put(A, *encoded(kv()))
    yield tier
    tier.close()


def again(tier, **options):
    tier.close()
    return DiskTier(
        tier.path, options.pop("capacity", tier.capacity), lru, clock=tier._clock, **options
    )


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE = {
    "empty": lambda data: b"",
    "cut in the fixed part": lambda data: data[:20],
    "cut in the header": lambda data: data[:100],
    "cut in the last layer": lambda data: data[:-1],
    "longer than it should be": lambda data: data + b"\0",
    "not a chunk file": lambda data: b"PK\3\4" + data[4:],
    "an older version": lambda data: (
        data[:8] + (FORMAT_VERSION - 1).to_bytes(4, "little") + data[12:]
    ),
    "a newer version": lambda data: (
        data[:8] + (FORMAT_VERSION + 1).to_bytes(4, "little") + data[12:]
    ),
    "an absurd header length": lambda data: data[:12] + b"\xff\xff\xff\xff" + data[16:],
    "a flipped bit in the header": lambda data: flipped(data, 80),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_without_a_row_is_never_adopted_whole(tier, damage):
    (path,) = files(tier.path)
    path.write_bytes(damage(path.read_bytes()))
    tier.close()
    for index in tier.path.glob("index.sqlite*"):
        index.unlink()
    with closing(again(tier)) as opened:
        assert opened.get(A, range(1)) is None
        assert opened.counts["corrupt"] == 1
        assert files(tier.path) == []


def test_a_file_of_another_entry_is_never_read_for_it(tier):
    (path,) = files(tier.path)
    tier.put(key("b"), *encoded(kv(3)))
    (other,) = (each for each in files(tier.path) if each != path)
    shutil.copy(other, path)
    assert tier.get(A, range(1)) is None
    assert tier.counts["corrupt"] == 1


def test_a_file_deleted_behind_our_back_is_a_miss(tier, caplog):
    files(tier.path)[0].unlink()
    assert tier.stat([A])
    assert tier.get(A, range(1)) is None
    assert tier.counts["corrupt"] == 1
    assert str(A) in caplog.text
    assert tier.list() == []


def test_entries_hits_use_and_pins_survive_a_restart(tier):
    for _ in range(3):
        tier.get(A, range(1))
    tier.pin([A], True)
    before = tier.stat([A])[A]
    with closing(again(tier)) as opened:
        assert opened.stat([A]) == {A: before}
        assert opened.stat([A])[A].hits == 3
        assert torch.equal(opened.get(A, range(1, 2))[1], encoded(kv())[1][1])


@pytest.mark.parametrize(
    "content", [b"not a database at all, just words" * 40, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_damaged_index_is_set_aside_and_built_again(tier, content, caplog):
    tier.close()
    (tier.path / "index.sqlite").write_bytes(content)
    with closing(again(tier)) as opened:
        assert opened.get(A, range(1)) is not None
    assert (tier.path / "index.sqlite.bad").read_bytes() == content
    assert "renamed to end in .bad" in caplog.text


def test_an_index_damaged_while_open_is_a_miss_and_not_an_error(tier):
    with sqlite3.connect(tier.path / "index.sqlite") as connection:
        connection.execute("DROP TABLE entries")
    connection.close()
    assert tier.stat([A]) == {}
    assert not tier.put(key("b"), *encoded(kv()))
    assert tier.delete([A]) == 0
    assert tier.counts["failed"] == 3


def test_opening_with_a_smaller_capacity_drops_nothing_and_the_next_write_keeps_it(tier):
    unit = tier.nbytes
    for name in "bcd":
        tier.put(key(name), *encoded(kv()))
    with closing(again(tier, capacity=2 * unit)) as opened:
        assert {entry.key for entry in opened.list()} == {key(name) for name in "abcd"}
        assert opened.get(A, range(1)) is not None
        assert not opened.put(key("big"), *encoded(kv(n=500)))
        assert (opened.nbytes, opened.counts["evicted"]) == (4 * unit, 0)
        assert opened.put(key("e"), *encoded(kv()))
        assert {entry.key for entry in opened.list()} == {A, key("e")}  # A was read
        assert sum(path.stat().st_size for path in files(tier.path)) == opened.nbytes == 2 * unit


# full and broken media


def test_a_file_size_limit_of_the_system_stores_nothing_and_raises_nothing(tmp_path):
    big, small = encoded(kv(n=9000)), encoded(kv())

    def work():
        tier = DiskTier(tmp_path, 1 << 30, lru)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        kept = tier.put(key("big"), *big)
        left = (tier.nbytes, len(files(tier.path)), tier.counts["failed"])
        return kept, left, tier.put(key("small"), *small), len(tier.list())

    assert asked(work) == (False, (0, 0, 1), True, 1)


# folders


def test_a_store_whose_folder_is_a_file_says_so_and_what_to_do(tmp_path):
    path = tmp_path / "store"
    path.write_text("mine")
    with pytest.raises(StoreError, match=r"is a file.*RAGFUSE_HOME"):
        DiskTier(path, 1 << 20, lru)
    assert path.read_text() == "mine"


def test_a_folder_without_permission_is_refused(tmp_path):
    closed, inside = tmp_path / "closed", tmp_path / "closed" / "new"
    closed.mkdir(mode=0o500)

    def refused(path):
        with pytest.raises(StoreError) as caught:
            DiskTier(path, 1 << 20, lru)
        return str(caught.value)

    def work():
        if os.geteuid() == 0:
            os.setuid(65534)  # root may write everywhere
        return [refused(path) for path in (closed, inside)]

    for message in asked(work):
        assert "RAGFUSE_STORE" in message
        assert "permission" in message.lower()


def test_foreign_files_in_the_folder_are_left_alone(tier):
    stranger = files(tier.path)[0].parent / "notes.txt"
    stranger.write_text("mine")
    with closing(again(tier)) as opened:
        assert stranger.read_text() == "mine"
        assert opened.counts["corrupt"] == 0


# closing
