"""Media that lie, on a disk: files that say what is not so, are no files, or shrink. All is a miss; nothing waits."""

from __future__ import annotations

import os
import socket
import sqlite3

import pytest
import torch

from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier
from ragfuse.store.chunkfile import Header, pack_header
from ragfuse.store.plainfile import MAX_SPARSE_FACTOR, check_there, open_plain
from ragfuse.store.tier import entry_from_row
from ragfuse.store.upkeep import chunk_path
from tests.store.kit import encoded, files, key, kv
from tests.store.lies import Told, lies, little_memory, packed

A, B = key("a"), key("b")


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(tmp_path / "tier", 1 << 30, lru)
    for each in (A, B):
        assert tier.write(each, *encoded(kv()))
    yield tier
    tier.close()


def is_sound(tier: DiskTier) -> bool:
    """Whether the other entry is read, and new ones are written."""
    return tier.read(B, 0, 3) is not None and tier.write(key("c"), *encoded(kv())) and B in tier.entries()


@pytest.mark.parametrize("text", lies().values(), ids=lies().keys())
def test_a_head_that_says_what_is_not_so_is_dropped_and_counted(tier, text):
    path = chunk_path(tier.path, A)
    path.write_bytes(packed(A, text))
    with little_memory():
        assert tier.read(A, 0, 3) is None
    assert tier.counts["corrupt"] == 1
    assert A not in tier.entries()
    assert is_sound(tier)


@pytest.mark.parametrize("text", lies().values(), ids=lies().keys())
def test_opening_a_store_with_such_a_head_leaves_it_out(tier, text, tmp_path):
    chunk_path(tier.path, A).write_bytes(packed(A, text))
    tier.close()
    with little_memory():
        again = DiskTier(tmp_path / "tier", 1 << 30, lru)
        assert again.read(A, 0, 3) is None  # one as long as before is looked at when it is read
    assert set(again.entries()) == {B}
    assert is_sound(again)
    again.close()


def test_a_head_longer_than_its_file_takes_no_memory(tier):
    path = chunk_path(tier.path, A)
    data = bytearray(path.read_bytes())
    data[12:16] = (0xFFFFFFFF).to_bytes(4, "little")
    path.write_bytes(data)
    with little_memory(1 << 20):
        assert tier.read(A, 0) is None
    assert tier.counts["corrupt"] == 1


@pytest.mark.parametrize("size", [1 << 33, 1 << 40])
def test_a_file_that_is_mostly_a_hole_takes_no_memory(tier, size, monkeypatch):
    described, asked = encoded(kv())[0], []
    text = (
        described.sealed(encoded(kv())[1])
        .to_json()
        .replace(f'"nbytes": {described.layers[0].nbytes}', f'"nbytes": {size}', 1)
    )
    head = pack_header(A, Told(text))
    path = chunk_path(tier.path, A)
    path.write_bytes(head)
    os.truncate(path, Header.parse(head).nbytes)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: asked.append(shape) or real(*shape, **options))
    assert tier.read(A, 0) is None
    assert asked == []
    assert tier.counts["corrupt"] == 1
    assert A not in tier.entries()
    assert is_sound(tier)


def test_a_file_that_shrinks_while_it_is_read_is_a_miss(tier):
    assert tier.read(A, 0) is not None  # and its file stays open
    os.truncate(chunk_path(tier.path, A), 100)
    assert tier.read(A, 1) is None
    assert tier.counts["corrupt"] == 1
    assert is_sound(tier)


def pipe(path):
    os.mkfifo(path)


def listener(path):
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(path.parent)
        one.bind(path.name)


def elsewhere(path):
    path.symlink_to("/etc/hostname")


def endless(path):
    path.symlink_to("/dev/zero")


def itself(path):
    path.symlink_to(path.name)


STRANGERS = {each.__name__: each for each in (pipe, listener, elsewhere, endless, itself)}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS.keys())
@pytest.mark.parametrize("opened", [False, True])
def test_what_is_no_file_in_place_of_one_is_dropped_at_once(tier, stranger, opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = chunk_path(tier.path, A)
    path.unlink()
    stranger(path)
    if opened:
        tier.close()
        tier = DiskTier(tmp_path / "tier", 1 << 30, lru)
    assert tier.read(A, 0) is None
    assert set(tier.entries()) == {B}
    assert not os.path.lexists(path)
    assert is_sound(tier)
    assert tier.write(A, *encoded(kv()))
    tier.close()


@pytest.mark.parametrize("opened", [False, True])
def test_a_folder_in_place_of_a_file_is_told_to_stay_and_why_nothing_is_written(tier, opened, tmp_path, caplog):
    path = chunk_path(tier.path, A)
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    if opened:
        tier.close()
        tier = DiskTier(tmp_path / "tier", 1 << 30, lru)
    assert tier.read(A, 0) is None
    assert f"and stays: move '{path}' away" in caplog.text
    caplog.clear()
    assert not tier.write(A, *encoded(kv()))
    assert (
        f"Could not write chunks (tier disk): a folder stands in place of its file, and stays: move '{path}'"
        in caplog.text
    )
    path.rename(tmp_path / "away")
    assert tier.write(A, *encoded(kv()))
    assert is_sound(tier)
    tier.close()


def test_a_folder_in_place_of_a_file_is_left_alone_and_its_row_forgotten(tier, tmp_path):
    path = chunk_path(tier.path, A)
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    assert tier.read(A, 0) is None
    assert (set(tier.entries()), tier.counts["corrupt"]) == ({B}, 1)
    tier.tidy()
    assert (path / "notes.txt").read_text() == "mine"
    assert is_sound(tier)
    tier.close()
    again = DiskTier(tmp_path / "tier", 1 << 30, lru)
    assert again.counts["corrupt"] == 0
    assert (path / "notes.txt").exists()
    again.close()


def test_files_behind_a_link_in_the_folder_are_nobody_s_here(tier, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("letter.kv", "draft.tmp"):
        (mine / name).write_text("mine")
    (tier.path / "chunks" / "zz").symlink_to(mine)
    tier.tidy()
    tier.close()
    DiskTier(tmp_path / "tier", 1 << 30, lru).close()
    assert sorted(path.name for path in mine.iterdir()) == ["draft.tmp", "letter.kv"]


def test_a_part_of_a_file_is_there_where_enough_of_it_was_written(tmp_path):
    path, size = tmp_path / "file", 64 << 20
    path.write_bytes(b"x" * (2 * size // MAX_SPARSE_FACTOR))
    os.truncate(path, size)
    fd = open_plain(path)
    check_there(fd, 0, size)
    with pytest.raises(ValueError, match="a hole in the file"):
        check_there(fd, size // 2, size)
    with pytest.raises(ValueError, match="a hole"):
        check_there(fd, size, 1 << 50)
    os.close(fd)


# rows

ROWS = {
    "layers without number": {"n_layers": 30_000_000},
    "no layers": {"n_layers": 0},
    "tokens below none": {"n_tokens": -5},
    "more tokens than ids": {"n_tokens": 1 << 40},
    "hits below none": {"hits": -1},
    "hits beyond counting": {"hits": (1 << 63) - 1},
    "bytes beyond any medium": {"nbytes": 1 << 62, "sizes": f"raw={1 << 62}"},
    "fewer bytes than layers": {"nbytes": 2, "sizes": "raw=2"},
    "a text for a number": {"n_tokens": "many"},
    "bytes for a number": {"n_layers": b"\xff\xfe"},
    "a fraction for a number": {"n_layers": 2.5},
    "used in no time": {"last_used": 1e308},
    "used at infinity": {"last_used": float("inf")},
    "a text for a time": {"last_used": "yesterday"},
    "sizes that are none": {"sizes": "raw=1_000"},
}


@pytest.mark.parametrize("change", ROWS.values(), ids=ROWS.keys())
def test_a_row_that_no_entry_has_is_no_entry_and_comes_back_from_its_file(tier, change):
    with sqlite3.connect(tier.path / "index.sqlite") as raw:
        for column, value in change.items():
            raw.execute(f"UPDATE entries SET {column} = ? WHERE key = ?", (value, str(A)))
    raw.close()
    assert set(tier.entries()) == set(tier.entries([A, B])) == {B}
    tier.tidy()
    assert tier.entries()[A].n_layers == 3
    assert tier.nbytes == sum(path.stat().st_size for path in files(tier.path))
    assert is_sound(tier)


@pytest.mark.parametrize("sums", ["NULL, NULL", "'many', 'much'", "1e300, 1e300", "-5, -5", None])
def test_sums_that_are_none_are_made_anew(tier, sums):
    with sqlite3.connect(tier.path / "index.sqlite") as raw:
        raw.execute("DELETE FROM total")
        if sums is not None:
            raw.execute(f"INSERT INTO total VALUES (0, {sums})")
    raw.close()
    assert tier.nbytes >= 0
    assert tier.n_entries >= 0
    tier.tidy()
    assert (tier.n_entries, tier.nbytes) == (2, sum(path.stat().st_size for path in files(tier.path)))
    assert is_sound(tier)


def test_an_entry_is_told_of_only_where_its_numbers_can_be_an_entry_s():
    good = {"n_tokens": 5, "n_layers": 3, "sizes": {"raw": 3}, "last_used": 1.0}
    assert entry_from_row(A, "disk", **good).nbytes == 3
    bad = [{"n_tokens": 0}, {"n_layers": 9000}, {"sizes": {"raw": 2}}, {"sizes": {"raw": 4, "int8": -1}}]
    bad += [{"last_used": each} for each in (float("nan"), float("-inf"), 1e13)]
    for each in bad:
        with pytest.raises(ValueError, match=r"invalid (counts|size|use)"):
            entry_from_row(A, "disk", **{**good, **each})
