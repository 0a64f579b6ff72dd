"""The object tier against objects that are damaged, cut short, foreign, gone or written anew."""

import logging
import random
import shutil
from pathlib import Path

import pytest

from ragfuse.store.chunkfile import FILE_MAGIC, Header
from ragfuse.store.names import chunk_name
from tests.store.kit import encoded, key, kv
from tests.store.objects.kit import A, hits, layers, objects, opened
from tests.store.s3_server import shared
from tests.store.test_disk import DAMAGE, flipped


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_object_is_dropped_counted_and_named(tier, folder, damage, caplog):
    (path,) = objects(folder)
    path.write_bytes(damage(path.read_bytes()))
    strange = is_strange(path.read_bytes())  # never written by us: it is left alone
    with caplog.at_level(logging.WARNING, "ragfuse.store"):
        other = opened(folder)
        hits(layers(other), encoded(kv())[1])
        assert other.entries() == {}  # what is wrong with padding alone is noticed by a listing
    assert str(A) in caplog.text
    assert other.counts["corrupt"] >= 1 if strange else other.counts["corrupt"] == 1
    assert objects(folder) == ([path] if strange else [])
    assert other.nbytes == 0
    assert other.write(A, *encoded(kv()))
    assert other.read(A, 0) is not None


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_look_up_gives_an_entry_if_its_header_is_whole(tier, folder, damage):
    (path,) = objects(folder)
    path.write_bytes(damage(path.read_bytes()))
    wanted = is_header_of(A, path.read_bytes())
    strange = is_strange(path.read_bytes())
    other = opened(folder)
    assert (A in other.entries([A])) is wanted
    assert (other.counts["corrupt"], path.exists()) == (int(not wanted), wanted or strange)


def is_strange(data: bytes) -> bool:
    """Whether an object begins with something else than ours do."""
    return data[: len(FILE_MAGIC)] != FILE_MAGIC[: len(data)]


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
        other, strange = opened(folder), is_strange(path.read_bytes())
        seen = hits(layers(other), blobs)
        assert not all(seen)
        assert other.counts["corrupt"] >= 1
        assert path.exists() is strange


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
