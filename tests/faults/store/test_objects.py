"""The object tier: folders, buckets, rights, stores that are down, damage, and processes that are
killed.
"""

import importlib.util
import logging
import os
import time

import pytest
import torch

from ragfuse.errors import StoreError
from ragfuse.store.objects import ObjectTier
from tests.kits.redis_server import free_port
from tests.kits.s3_server import S3Server, shared
from tests.kits.store import encoded, forked, key, kv

A, B = key("a"), key("b")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "bucket"


def opened(folder):
    return ObjectTier(f"file://{folder}", timeout_s=30)


@pytest.fixture
def tier(folder):
    return opened(folder)


def first(tier, of=A):
    return tier.get(of, range(1))


def test_an_entry_that_others_delete_or_overwrite_is_read_as_it_is_now(tier, folder):
    other = opened(folder)
    assert tier.put(A, *encoded(kv()))
    assert first(other) is not None
    meta, blobs = encoded(kv(5, n=90))
    assert tier.put(A, meta, blobs)
    assert torch.equal(first(other)[1], blobs[0])
    tier.delete([A])
    assert (first(other), other.counts["corrupt"]) == (None, 0)


def test_other_files_in_the_folder_are_left_alone(tier, folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "photos.kv").write_text("mine")
    assert tier.put(A, *encoded(kv()))
    assert [entry.key for entry in tier.list()] == [A]
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "photos.kv", f"{A}.kv"}


def test_a_writer_that_is_killed_leaves_no_entry_and_its_rest_is_tidied_away_an_hour_later(folder):
    def work(pipe):
        tier = opened(folder)

        async def stopping(*_):
            pipe.send("stopped")
            time.sleep(60)

        tier._fs._mv = stopping
        tier.put(A, *encoded(kv()))

    process, pipe = forked(work)
    assert pipe.recv() == "stopped"
    process.kill()
    process.join()
    tier = opened(folder)
    assert (tier.stat([A]), first(tier), list(tier.list())) == ({}, None, [])
    (rest,) = folder.iterdir()
    os.utime(rest, (time.time() - 4000, time.time() - 4000))
    opened(folder)
    assert list(folder.iterdir()) == []


def refused(url, **options):
    with pytest.raises(StoreError) as caught:
        ObjectTier(url, **options)
    return str(caught.value)


def test_a_url_of_no_object_store_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for url in ("gopher://host/folder", f"file://{tmp_path}/file", f"file://{tmp_path}/file/below"):
        assert url in refused(url)
    for url in ("gopher://me:hunter2@host/folder", f"ftp://me:hunter2@127.0.0.1:{free_port()}/a"):
        assert "hunter2" not in refused(url)


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_driver_that_is_not_installed_is_named():
    assert "gcsfs" in refused("gs://bucket/folder")


def test_a_bucket_that_does_not_exist_is_refused_and_not_made():
    with shared().reachable():
        assert "bucket" in refused("s3://no-such-bucket/folder", timeout_s=30)
    assert "no-such-bucket" not in [
        bucket["Name"] for bucket in shared().client.list_buckets()["Buckets"]
    ]


def test_missing_credentials_are_refused(monkeypatch, tmp_path):
    with shared().reachable():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        assert "credentials" in refused(f"s3://{shared().bucket}/folder", timeout_s=30)


def test_a_store_that_goes_down_is_left_out(caplog):
    caplog.set_level(logging.INFO, "ragfuse.store")
    server = S3Server()
    tier = server.tier(server.new_url())
    assert tier.put(A, *encoded(kv()))
    server.stop()
    assert first(tier) is None
    assert not tier.put(B, *encoded(kv()))
    assert not tier.answers
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1


def test_a_level_is_read_by_one_request_once_its_header_is_known():
    server = shared()
    tier = server.tier(server.new_url())
    assert tier.put(A, *encoded(kv()))
    assert set(tier.stat([A])) == {A}
    server.asked.clear()
    assert tier.get(A, range(3)) is not None
    assert len(server.asked) == 1
