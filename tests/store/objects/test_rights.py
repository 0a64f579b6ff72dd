"""The object tier where it may do little: read alone, or not even that."""

import logging

import pytest

from ragfuse.store import names
from ragfuse.store.names import chunk_name, pin_name
from ragfuse.store.tier import Freed
from tests.store.kit import encoded, key, kv
from tests.store.objects.kit import A, B, hits, layers, warnings


def test_a_bucket_that_may_only_be_read_is_read_and_says_once_what_it_does_not_take(server, caplog):
    url = server.new_url()
    for i in range(3):
        assert server.tier(url).write(key(i), *encoded(kv(i)))
    user = server.user("s3:Get*", "s3:List*")
    with server.strict(), caplog.at_level(logging.WARNING, "ragfuse.store"):
        tier = server.tier(url, user=user, cool_down_s=3600.0)
        assert [tier.write(key(i), *encoded(kv())) for i in range(2, 7)] == [False] * 5
        tier.pin([key(0)], True)
        assert tier.delete([key(1)]) == 0
        assert set(tier.entries()) == {key(i) for i in range(3)}
        for i in range(3):
            assert all(hits(layers(tier, key(i)), encoded(kv(i))[1]))
        assert not tier.breaker.is_open
    assert [text.split("could not ")[1].split()[0] for text in warnings(caplog)] == ["write", "pin", "delete"]
    assert "Denied" in caplog.text
    assert tier.counts["failed"] == 7
    assert tier.nbytes == server.tier(url).nbytes


def test_one_bad_object_that_cannot_be_deleted_hides_no_good_one(server, caplog):
    url = server.new_url()
    for name in (A, B):
        assert server.tier(url).write(name, *encoded(kv()))
    path = url.removeprefix(f"s3://{server.bucket}/") + "/" + chunk_name(A)
    user = server.user("s3:Get*", "s3:List*")
    for body in (b"", b"nonsense" * 200):
        server.client.put_object(Bucket=server.bucket, Key=path, Body=body)
        with server.strict():
            tier = server.tier(url, user=user)
            assert set(tier.entries([A, B])) == {B}
            assert tier.read(A, 0) is None
            assert tier.read(B, 0) is not None
            assert tier.counts["corrupt"] > 0
            assert set(tier.entries()) == {B}


def test_what_is_left_lying_about_and_cannot_be_deleted_spoils_no_listing(server, caplog):
    url = server.new_url()
    assert server.tier(url).write(A, *encoded(kv()))
    path = url.removeprefix(f"s3://{server.bucket}/") + "/" + pin_name(B)
    server.client.put_object(Bucket=server.bucket, Key=path, Body=b"")
    user = server.user("s3:Get*", "s3:List*")
    with server.strict(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_ABANDONED_S", -60.0)
        tier = server.tier(url, user=user)
        assert set(tier.entries()) == {A}
        assert tier.tidy() == Freed()
    assert "Could not delete leftover objects" in caplog.text


def test_a_bucket_deleted_behind_our_back_is_misses_until_it_is_there_again(server, caplog):
    url = server.new_url()
    tier = server.tier(url, fresh_s=0.0)
    assert tier.write(A, *encoded(kv()))
    for each in server.client.list_objects_v2(Bucket=server.bucket)["Contents"]:
        server.client.delete_object(Bucket=server.bucket, Key=each["Key"])
    server.client.delete_bucket(Bucket=server.bucket)
    assert tier.read(A, 0) is None
    assert (tier.entries([A, B]), tier.entries()) == ({}, {})
    assert not tier.write(B, *encoded(kv()))
    assert not tier.breaker.is_open
    assert "bucket does not exist" in caplog.text
    server.client.create_bucket(Bucket=server.bucket)
    assert tier.write(B, *encoded(kv()))
    assert tier.read(B, 0) is not None
