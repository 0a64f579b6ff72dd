"""Archives: what is exported comes back bit for bit, and a damaged one gives what is whole."""

from __future__ import annotations

import io
import json
import random
import tarfile

import pytest
import torch

from ragfuse.errors import StoreError
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier, bulk
from ragfuse.store.archive import ArchivedText
from ragfuse.types.keys import FORMAT_VERSION
from tests.store.kit import encoded, files, key, kv, same

MB = 1 << 20
KEYS = [key(i) for i in range(4)]
TEXTS = [ArchivedText(KEYS[i].model, str(KEYS[i]), f"text {i}\n\0é", f"{i}.txt") for i in range(3)]


@pytest.fixture
def store(tmp_path):
    with KVStore([MemoryTier(MB, lru), DiskTier(tmp_path / "from", MB, lru)]) as store:
        for i, one in enumerate(KEYS):
            store.put(one, kv(i, n=5 + i), wait=True)
        yield store


@pytest.fixture
def empty(tmp_path):
    with KVStore([MemoryTier(MB, lru), DiskTier(tmp_path / "to", MB, lru)]) as store:
        yield store


@pytest.fixture
def archive(store, tmp_path):
    path = tmp_path / "chunks.tar"
    bulk.export(store, path, KEYS, TEXTS)
    return path


def are_right(store: KVStore) -> set[int]:
    """Return which chunks are in the slow tier; they are as they were."""
    there = {i for i, one in enumerate(KEYS) if store.tiers[1].stat([one])}
    for i in there:
        layers = store.read_layers(KEYS[i], 0, 3, tier="disk")
        assert all(same(*pair) for pair in zip(layers, kv(i, n=5 + i).layers, strict=True))
    return there


def made(path, members: dict[str, bytes], version=FORMAT_VERSION):
    """Return an archive of these members."""
    first = {"ragfuse-archive.json": json.dumps({"version": version}).encode()}
    with tarfile.open(path, "w") as tar:
        for name, data in {**first, **members, "end": b""}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_what_is_exported_comes_back_bit_for_bit_with_its_texts(empty, archive):
    texts, told = [], []
    done = bulk.import_(empty, archive, take_texts=texts.extend, progress=lambda *numbers: told.append(numbers))
    assert (done.chunks, done.known, done.failed, done.texts) == (4, 0, 0, 3)
    assert (texts, are_right(empty)) == (TEXTS, {0, 1, 2, 3})
    assert told == sorted(told)
    again = bulk.import_(empty, archive)
    assert (again.chunks, again.known, again.failed) == (0, 4, 0)
    assert archive.stat().st_mode & 0o777 == 0o600


def test_an_archive_is_a_tar_of_chunk_files_that_a_disk_tier_takes_as_they_are(archive, tmp_path):
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    tier = DiskTier(tmp_path / "unpacked", MB, lru)
    assert {entry.key for entry in tier.list()} == set(KEYS)
    assert torch.equal(tier.get(KEYS[2], range(1, 2))[1], encoded(kv(2, n=7))[1][1])
    tier.close()


def test_what_cannot_be_exported_is_told_and_replaces_no_whole_archive(store, archive, tmp_path):
    done = bulk.export(store, tmp_path / "some.tar", [*KEYS[:2], key("strange")])
    assert (done.chunks, done.failed) == (2, 1)
    before = archive.read_bytes()
    store.tiers[0].delete(KEYS)
    path = next(path for path in files(tmp_path / "from") if store.tiers[1].get(KEYS[0], range(1)))
    path.write_bytes(path.read_bytes()[:-1])
    for keys in (KEYS, [key("strange")]):
        with pytest.raises(StoreError, match="not replaced"):
            bulk.export(store, archive, keys)
    assert archive.read_bytes() == before
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(StoreError, match="cannot be written"):
        bulk.export(store, tmp_path / "none" / "a.tar")


def test_an_archive_larger_than_the_tier_leaves_what_fits_and_tells_the_rest(archive, tmp_path):
    with KVStore([DiskTier(tmp_path / "small", 6000, lru)]) as store:
        done = bulk.import_(store, archive)
        assert done.failed > 0
        assert len(store.entries()) == done.chunks > 0


def test_a_cut_or_damaged_archive_gives_what_is_whole_and_says_what_is_not(archive, tmp_path):
    whole, chance = archive.read_bytes(), random.Random(3)
    for round_ in range(60):
        at = chance.randrange(1024, len(whole.rstrip(b"\0")) - 600)
        bad = tmp_path / "bad.tar"
        bad.write_bytes(whole[:at] if round_ % 2 else whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with KVStore([MemoryTier(MB, lru), DiskTier(tmp_path / f"to{round_}", MB, lru)]) as store:
            done = bulk.import_(store, bad)
            assert len(are_right(store)) == done.chunks
            assert done.failed or round_ % 2 == 0  # a bit of padding or of a text means nothing to a chunk


@pytest.mark.parametrize("content", [b"", b"words" * 200, bytes(10240)])
def test_a_file_that_is_no_archive_is_refused(empty, tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for each in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(StoreError, match="Wanted an archive"):
            bulk.import_(empty, each)
    with pytest.raises(StoreError, match="found 99"):
        bulk.import_(empty, made(path, {}, version=99))


def test_other_members_make_no_file_and_no_harm(empty, tmp_path):
    texts = json.dumps(TEXTS[0]._asdict()).encode()
    members = {"../escaped": b"words", "/abs.kv": b"", "texts/1.jsonl": b"[1]", "texts/2.jsonl": texts}
    taken = []
    done = bulk.import_(empty, made(tmp_path / "odd.tar", members), take_texts=taken.extend)
    assert (done.chunks, done.failed, done.texts, taken) == (0, 3, 1, TEXTS[:1])
    assert not (tmp_path.parent / "escaped").exists()


def test_entries_that_cannot_be_decoded_here_are_left_out(archive, tmp_path):
    with KVStore([DiskTier(tmp_path / "other", MB, lru)], lambda level, model: None) as store:
        done = bulk.import_(store, archive)
        assert (done.chunks, done.failed, store.entries()) == (0, 4, [])


@pytest.mark.parametrize("text", ['"', "\\", "{[,:", "\u2028\n\r\0", "a" * 100_000, "\U0001f600"])
def test_any_text_comes_back(store, empty, tmp_path, text):
    texts, taken = [TEXTS[0]._replace(text=text)], []
    bulk.export(store, tmp_path / "a.tar", KEYS[:1], texts)
    bulk.import_(empty, tmp_path / "a.tar", take_texts=taken.extend)
    assert taken == texts
