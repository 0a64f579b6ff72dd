"""Opening an object tier: odd URLs, missing drivers, rights and credentials; names, secrets, closing."""

import importlib.util
import logging
import os
import socket

import pytest

from ragfuse.errors import StoreError
from ragfuse.plan.evict import lru
from ragfuse.store.objects import ObjectTier
from tests.store.kit import asked, encoded, kv
from tests.store.objects.kit import A, objects, opened, warnings
from tests.store.redis_server import free_port
from tests.store.s3_server import shared


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


def test_keys_of_all_forms_find_their_way_back_and_none_but_digests_are_keys(folder):
    forms = [type(A)(A.model, A.tokens, context, layout) for context in ("", "~", A.tokens) for layout in ("", "at12")]
    for each in forms:
        assert opened(folder).write(each, *encoded(kv()))
    tier = opened(folder)
    assert set(tier.entries()) == set(forms)
    assert all(tier.read(each, 0) is not None for each in forms)
    for odd in (type(A)("mo/del", "/etc/x y", "~cont?ext#", "lay%2Fout*"), type(A)("photos", "a", "b", "c")):
        with pytest.raises(ValueError, match="cannot be stored"):
            tier.write(odd, *encoded(kv()))
    assert len(objects(folder)) == len(forms)


def test_a_closed_tier_misses_and_closes_twice(tier):
    tier.close()
    tier.close()
    assert tier.read(A, 0) is None
    assert tier.entries() == {}
    assert not tier.write(A, *encoded(kv()))
    assert tier.nbytes == 0
