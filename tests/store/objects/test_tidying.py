"""What writers that died left behind in objects, and when it is freed."""

import os
from pathlib import Path

from ragfuse.store import names, s3
from ragfuse.store.names import pin_name
from ragfuse.store.tier import Freed
from tests.store.kit import forked, key
from tests.store.objects.kit import A, B, objects
from tests.store.redis_server import until
from tests.store.slow_link import large


def test_what_dead_writers_left_long_ago_is_freed_and_the_rest_stays(tier, folder):
    (path,) = objects(folder)
    old, young = path.with_name(path.name + ".x.1.tmp"), path.with_name(path.name + ".x.2.tmp")
    notes, orphan = path.with_name("notes.x.1.tmp"), folder / pin_name(B)
    pin = orphan.with_name(orphan.name + ".x.3.tmp")
    orphan.parent.mkdir(parents=True)
    strange = orphan.with_name(Path(pin_name(key("c"))).name)  # called as a pin is, and no pin: those are empty
    for left in (old, young, notes, pin, strange):
        left.write_bytes(b"half")
    orphan.touch()
    for left in (old, notes, orphan, pin, strange):
        os.utime(left, (0, 1e9))
    assert tier.tidy() == Freed(orphans=3, nbytes=8)
    assert objects(folder) == sorted([path, young, notes, strange])
    assert tier.tidy() == Freed()
    assert set(tier.entries()) == {A}


def uploads(server) -> list[str]:
    return sorted(each["Key"] for each in server.client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", []))


def cut_off(server, url) -> int:
    """A process that is killed when all parts of an object are there, and it only has to be said; their bytes."""
    before = len(server.asked)

    def work(pipe):
        from s3fs import S3FileSystem

        s3._ONE_PUT_NBYTES = 10 << 20
        S3FileSystem._pipe_file.__defaults__ = (5 << 20, *S3FileSystem._pipe_file.__defaults__[1:])  # parts of 5 MiB
        server.tier(url, 1 << 30, timeout_s=60.0).write(A, *large(6 << 20))

    server.stand_still(lambda asked: asked.method == "POST" and "uploadId" in asked.path, lose=True)
    process, _ = forked(work)
    until(lambda: any("uploadId" in asked.path and asked.method == "POST" for asked in server.asked[before:]))
    process.kill()
    process.join()
    server.go_on()
    (upload,) = server.client.list_multipart_uploads(Bucket=server.bucket)["Uploads"]
    which = {"Bucket": server.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
    return sum(part["Size"] for part in server.client.list_parts(**which)["Parts"])


def test_an_upload_that_was_cut_off_is_ended_once_it_is_old_and_others_are_left_alone(server, monkeypatch):
    url = server.new_url()
    nbytes = cut_off(server, url)
    assert nbytes > 12 << 20
    ours = uploads(server)
    others = [f"{Path(ours[0]).parent}/notes", ours[0].replace("folder", "other"), "loose"]
    for name in others:
        server.client.create_multipart_upload(Bucket=server.bucket, Key=name)
    tier = server.tier(url)
    assert tier.read(A, 0) is None
    with monkeypatch.context() as patch:
        patch.setattr(names, "_CUT_OFF_S", 1e10)  # moto says of every upload that it is of 2010
        assert tier.tidy() == Freed()
        assert uploads(server) == sorted([*ours, *others])
    assert tier.tidy() == Freed(orphans=1, nbytes=nbytes)
    assert uploads(server) == sorted(others)
    assert tier.tidy() == Freed()
