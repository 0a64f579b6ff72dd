"""Buckets that lie: pages instead of answers, endless listings, objects that are others' or claim what is not there."""

import os
import tracemalloc

import pytest

from ragfuse.store.bucket import Bucket
from ragfuse.store.chunkfile import Header, pack_header
from ragfuse.store.names import CHUNKS_FOLDER, chunk_name, pin_name
from tests.store.kit import encoded, key, kv
from tests.store.lies import Told, lies, little_memory, packed
from tests.store.objects.kit import A, B, opened, warnings
from tests.store.s3_server import S3Server
from tests.store.slow_link import large

C = key("c")
HTML = b"<!doctype html><html><head><title>Sign in</title></head><body><p>Sign in<br></body></html>"
XHTML = b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body><p>Sign in</p></body></html>'
ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>We failed</Message></Error>'
PAGES = {"a login page": HTML, "a login page in XML": XHTML, "an error": ERROR, "nothing": b"", "JSON": b'{"ok": true}'}
TYPE = [("Content-Type", "text/html")]


def is_sound(tier) -> bool:
    """Whether another entry is written, listed and read."""
    return tier.write(C, *encoded(kv())) and C in tier.entries() and tier.read(C, 0, 3) is not None


# in a folder


@pytest.mark.parametrize("text", lies().values(), ids=lies().keys())
def test_a_head_that_says_what_is_not_so_is_dropped_and_counted(tier, folder, text):
    path = folder / chunk_name(A)
    path.write_bytes(packed(A, text))
    for read in (lambda other: other.read(A, 0, 3), lambda other: other.entries([A]).get(A)):
        other = opened(folder, 1 << 30)
        with little_memory():
            read(other)
            assert other.read(A, 0, 3) is None
        assert other.counts["corrupt"] + other.counts["failed"] <= 1
        assert is_sound(other)
    assert not path.exists()


@pytest.mark.parametrize("size", [1 << 33, 1 << 43])
def test_an_object_that_is_mostly_a_hole_takes_no_memory(tier, folder, size):
    meta, blobs = encoded(kv())
    text = meta.sealed(blobs).to_json().replace(f'"nbytes": {meta.layers[0].nbytes}', f'"nbytes": {size}', 1)
    head, path = pack_header(A, Told(text)), folder / chunk_name(A)
    path.write_bytes(head)
    os.truncate(path, Header.parse(head).nbytes)
    other = opened(folder, 1 << 30)
    with little_memory():
        assert other.read(A, 0) is None
    assert other.counts["corrupt"] == 1
    assert is_sound(other)


def test_an_object_whose_head_claims_more_than_it_has_takes_no_memory(tier, folder):
    meta, blobs = encoded(kv())
    text = meta.sealed(blobs).to_json().replace(f'"nbytes": {meta.layers[0].nbytes}', f'"nbytes": {1 << 40}', 1)
    (folder / chunk_name(A)).write_bytes(pack_header(A, Told(text)) + bytes(1000))
    other = opened(folder, 1 << 30)
    with little_memory():
        assert other.read(A, 0) is None
    assert is_sound(other)


STRANGERS = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to a file": lambda path: path.symlink_to("/etc/hostname"),
    "a link to all zeros": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS.keys())
def test_what_is_no_file_in_a_shared_folder_is_left_alone_and_waited_for_by_nobody(folder, make):
    path = folder / chunk_name(A)
    path.parent.mkdir(parents=True)
    make(path)
    tier = opened(folder, timeout_s=5.0)
    assert A not in tier.entries([A, B])
    assert A not in tier.entries()
    assert tier.read(A, 0, 3) is None
    assert tier.nbytes == 0
    assert is_sound(tier)
    tier.tidy()
    assert os.path.lexists(path)
    assert not tier.breaker.is_open


FOREIGN = {
    "a letter": f"{CHUNKS_FOLDER}/photos/a.b.c.kv",
    "a name with dots": f"{CHUNKS_FOLDER}/report/2024.final.v2.x.kv",
    "capitals": f"{CHUNKS_FOLDER}/{A.model.upper()}/{A.tokens}.-.-.kv",
    "a file beside": f"{CHUNKS_FOLDER}/notes.txt",
    "a pin of nothing": "pins/photos/a.b.c.pin",
    "half a write": f"{CHUNKS_FOLDER}/photos/a.b.c.kv.x.1.tmp",
    "deep": f"{CHUNKS_FOLDER}/{A.model}/x/{A.tokens}.-.-.kv",
}


@pytest.mark.parametrize("name", FOREIGN.values(), ids=FOREIGN.keys())
def test_objects_of_others_are_never_deleted_and_never_counted(folder, name):
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    os.utime(path, (0, 1e9))
    tier = opened(folder, ttl_s=60.0)
    assert tier.entries() == {}
    assert tier.nbytes == 0
    assert is_sound(tier)
    tier.tidy()
    assert tier.delete([A, C]) == 1
    assert path.read_bytes() == b"mine"


def test_what_is_called_as_ours_and_is_none_is_left_alone_and_counts_for_nothing(folder, caplog):
    path = folder / chunk_name(A)
    path.parent.mkdir(parents=True)
    path.write_bytes(HTML * 1000)
    tier = opened(folder, 20_000)
    assert tier.read(A, 0) is None
    assert tier.entries([A]) == {}
    for _ in range(3):
        assert tier.entries() == {}
        assert tier.nbytes == 0
    assert any("not written by ragfuse" in each for each in warnings(caplog))
    assert is_sound(tier)
    assert path.read_bytes() == HTML * 1000
    assert tier.write(A, *encoded(kv()))  # in its place: this name is ours
    assert tier.read(A, 0, 3) is not None


def test_a_folder_that_holds_itself_is_listed_once(folder):
    tier = opened(folder)
    assert tier.write(A, *encoded(kv()))
    (folder / CHUNKS_FOLDER / "again").symlink_to(".")
    (folder / CHUNKS_FOLDER / A.model / "up").symlink_to("..")
    assert set(opened(folder).entries()) == {A}


@pytest.mark.parametrize("info", [{"size": None}, {"size": "7"}, {"size": -1}, {"size": 1 << 60}, {}])
def test_an_object_of_which_a_listing_says_nonsense_hides_no_other(tier, folder, info, monkeypatch):
    page = Bucket._page

    async def lying(self, name, after):
        ls = self._fs._ls

        async def odd(path, detail):
            found = await ls(path, detail=detail)
            base = {"name": f"{path}/{B.tokens}.-.-.kv", "type": "file", "mtime": "yesterday"}
            return [*found, {**base, **info}] if path.endswith(A.model) else found

        monkeypatch.setattr(self._fs, "_ls", odd)
        try:
            return await page(self, name, after)
        finally:
            monkeypatch.setattr(self._fs, "_ls", ls)

    monkeypatch.setattr(Bucket, "_page", lying)
    other = opened(folder)
    assert set(other.entries()) == {A}
    assert other.counts["failed"] == 0


# on S3


@pytest.fixture
def bucket(server):
    """A tier on a server of the test's own, which holds A."""
    tier = server.tier(server.new_url(), 1 << 20, timeout_s=10.0, cool_down_s=0.0, fresh_s=0.0)
    assert tier.write(A, *encoded(kv()))
    return tier


def lying(server: S3Server, method: str, body: bytes, status: str = "200 OK", headers=TYPE) -> None:
    server.lie = lambda asked: (status, headers, body) if asked.method == method else None


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_a_page_with_status_200_is_not_taken_for_a_write(server, bucket, page):
    for headers in (TYPE, [*TYPE, ("ETag", '"5e5f-6a1b"')]):
        lying(server, "PUT", page, headers=headers)
        before = bucket.nbytes
        assert not bucket.write(B, *encoded(kv()))
        assert bucket.nbytes == before
        assert B not in bucket.entries([B])
    server.lie = lambda asked: None
    assert is_sound(bucket)
    assert set(bucket.entries()) == {A, C}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_a_page_with_status_200_is_not_taken_for_a_listing(server, bucket, page):
    bucket.pin([A], True)
    server.lie = lambda asked: ("200 OK", TYPE, page) if "list-type" in asked.path else None
    bucket.entries()
    bucket.tidy()
    assert bucket.counts["failed"] > 0
    server.lie = lambda asked: None
    assert bucket.entries()[A].pinned
    assert bucket.read(A, 0, 3) is not None
    assert is_sound(bucket)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_a_page_with_status_200_is_not_taken_for_an_object_and_deletes_none(server, bucket, page):
    other = server.tier(
        f"s3://{bucket.breaker.name.split('s3://')[1].rstrip(')')}", 1 << 20, timeout_s=10.0, fresh_s=0.0
    )
    server.lie = lambda asked: ("200 OK", TYPE, page) if asked.method == "GET" and asked.range else None
    for tier in (bucket, other):
        assert tier.read(A, 0, 3) is None
        assert tier.entries([A]).keys() <= {A}
    server.lie = lambda asked: None
    if page:  # an empty object in place of ours is one that was cut short
        assert server.client.head_object(Bucket=server.bucket, Key=object_of(server, A))["ContentLength"] > 1000
        assert other.entries().keys() == {A}
        assert other.read(A, 0, 3) is not None
    assert is_sound(bucket)


def test_a_page_with_status_200_is_not_taken_for_the_end_of_a_write_in_parts(server, bucket, monkeypatch):
    from s3fs import S3FileSystem

    monkeypatch.setattr("ragfuse.store.s3._ONE_PUT_NBYTES", 10 << 20)
    rest = S3FileSystem._pipe_file.__defaults__[1:]
    monkeypatch.setattr(S3FileSystem._pipe_file, "__defaults__", (5 << 20, *rest))
    tier = server.tier(server.new_url(), 1 << 30, timeout_s=20.0, cool_down_s=0.0, fresh_s=0.0)
    for page in PAGES.values():
        for told in ("uploads", "uploadId", ""):
            server.lie = lambda asked, told=told, page=page: (
                ("200 OK", TYPE, page) if asked.method in ("POST", "PUT", "HEAD") and told in asked.path else None
            )
            assert not tier.write(B, *large(6 << 20))
    server.lie = lambda asked: None
    assert B not in tier.entries()
    assert tier.write(B, *large(6 << 20))
    assert tier.read(B, 0) is not None


def object_of(server: S3Server, name) -> str:
    listed = server.client.list_objects_v2(Bucket=server.bucket)["Contents"]
    return next(each["Key"] for each in listed if each["Key"].endswith(chunk_name(name)))


def listed(keys: list[str], token: str, bucket: str) -> bytes:
    rows = "".join(
        f"<Contents><Key>{name}</Key><Size>10</Size><LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
        for name in keys
    )
    return (
        f'<?xml version="1.0"?><ListBucketResult><Name>{bucket}</Name><KeyCount>{len(keys)}</KeyCount>{rows}'
        f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>"
    ).encode()


ENDLESS = ["one token again and again", "the same objects again and again", "empty pages", "new objects for ever"]


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_listing_that_never_ends_is_given_up(server, bucket, kind, monkeypatch):
    monkeypatch.setattr("ragfuse.store.bucket._MAX_EMPTY_PAGES", 20)
    monkeypatch.setattr("ragfuse.store.bucket._MAX_PAGES", 40)
    n = 0

    def lie(asked):
        nonlocal n
        if "list-type" not in asked.path:
            return None
        n += 1
        number = f"{n:032x}" if kind == "new objects for ever" else "0" * 32
        names = [] if kind == "empty pages" else [f"x/{CHUNKS_FOLDER}/{A.model}/{number}.-.-.kv"]
        return "200 OK", [("Content-Type", "application/xml")], listed(names, "t" if "token" in kind else f"t{n}", "b")

    server.lie = lie
    bucket.entries()
    assert 0 < n < 100
    assert bucket.counts["failed"] == 1
    assert bucket.read(A, 0, 3) is not None
    server.lie = lambda asked: None
    assert is_sound(bucket)


def test_an_object_that_never_ends_is_read_no_further_than_was_asked(server, bucket):
    body = b"RAGFUSE\0" + bytes(200 << 20)
    server.lie = lambda asked: ("206 Partial Content", TYPE, body) if asked.range else None
    other = server.tier(f"s3://{bucket.breaker.name.split('s3://')[1].rstrip(')')}", 1 << 20, timeout_s=10.0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    assert other._bucket.read(chunk_name(A), 0, 1000) == body[:1000]
    assert other._bucket.heads([chunk_name(A)] * 3, 1000) == [body[:1000]] * 3
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize(
    "status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"]
)
def test_a_redirect_to_itself_is_a_miss_and_no_loop(server, bucket, status):
    asked = len(server.asked)
    server.lie = lambda asked: (status, [("Location", f"http://127.0.0.1:{server.port}{asked.path}")], b"")
    assert bucket.read(A, 0, 3) is None
    assert not bucket.write(B, *encoded(kv()))
    bucket.entries()
    assert len(server.asked) - asked <= 60  # at most twenty a call
    server.lie = lambda asked: None
    assert is_sound(bucket)


def test_a_pin_with_something_in_it_is_no_pin_of_ours_and_stays(server, bucket):
    name = object_of(server, A).replace(chunk_name(A), pin_name(B))
    server.client.put_object(Bucket=server.bucket, Key=name, Body=b"mine")
    bucket.tidy()
    assert server.client.get_object(Bucket=server.bucket, Key=name)["Body"].read() == b"mine"


@pytest.mark.parametrize("kind", ["one mark again and again", "empty pages"])
def test_a_listing_of_uploads_that_never_ends_is_given_up(server, bucket, kind, monkeypatch):
    monkeypatch.setattr("ragfuse.store.bucket._MAX_EMPTY_PAGES", 20)
    n = 0

    def lie(asked):
        nonlocal n
        if "uploads" not in asked.path:
            return None
        n += 1
        mark = "m" if "one" in kind else f"m{n}"
        marks = f"<NextKeyMarker>{mark}</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
        page = f"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>{marks}</ListMultipartUploadsResult>"
        return "200 OK", [("Content-Type", "application/xml")], page.encode()

    server.lie = lie
    bucket.tidy()
    assert 0 < n < 100
    server.lie = lambda asked: None
    assert is_sound(bucket)
