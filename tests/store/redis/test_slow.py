"""The redis tier over a link that is slow, and over one on which nothing moves any more: only silence is a failure."""

import pytest
import torch

from ragfuse.store import redis_index, redis_pieces
from tests.store.kit import encoded, key, kv
from tests.store.redis_server import RedisServer
from tests.store.slow_link import SlowLink, large

A = key("a")


@pytest.fixture
def link_to():
    """link_to(server, bytes per second): (the link, the server's URL by way of it)."""
    made = []

    def make(server: RedisServer, nbytes_per_s: float) -> tuple[SlowLink, str]:
        made.append(SlowLink(server.port, nbytes_per_s))
        return made[-1], f"redis://127.0.0.1:{made[-1].port}/0"

    yield make
    for link in made:
        link.close()


SLOW = [
    pytest.param(2 << 20, 2, 4e6, 0.2, id="half a second a layer, a fifth of silence"),
    pytest.param(16 << 20, 1, 2e6, 1.0, id="eight seconds a layer, one of silence", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("nbytes", "n_layers", "nbytes_per_s", "timeout_s"), SLOW)
def test_a_layer_that_takes_longer_than_the_timeout_is_written_and_read(
    server, link_to, open_tier, nbytes, n_layers, nbytes_per_s, timeout_s, caplog
):
    _, url = link_to(server, nbytes_per_s)
    meta, blobs = large(nbytes, n_layers)
    tier = open_tier(1 << 30, url=url, timeout_s=timeout_s, lease_s=2 * timeout_s)
    assert tier.write(A, meta, blobs)
    for layer, blob in enumerate(blobs):
        assert torch.equal(tier.read(A, layer)[1], blob)
    assert (tier.counts["failed"], tier.breaker.is_open, caplog.records) == (0, False, [])
    assert sorted(server.raw().hkeys(server.raw().keys("*chunk:*")[0])) == [
        *(str(i).encode() for i in range(n_layers)),
        b"head",
    ]


@pytest.mark.parametrize("doing", ["read", "write"])
def test_a_link_on_which_nothing_moves_costs_one_timeout(server, link_to, open_tier, doing):
    link, url = link_to(server, 4e6)
    tier = open_tier(1 << 30, url=url, timeout_s=0.2, cool_down_s=3600)
    assert tier.write(A, *encoded(kv()))
    link.cut()
    if doing == "read":
        assert tier.read(A, 0) is None
    else:
        assert not tier.write(key("b"), *large(4 << 20))
    assert tier.breaker.is_open
    assert tier.counts["failed"] == 1


def test_pieces_grow_on_a_fast_link(server, open_tier):
    tier = open_tier(1 << 30, url=server.url())
    assert tier.write(A, *large(8 << 20))
    assert tier._index._pace.nbytes > 4 << 20


def test_pieces_shrink_where_they_take_long_and_begin_anew_after_trouble():
    pace = redis_pieces.Pace(1.0)
    least = pace.nbytes
    for _ in range(3):
        pace.took(pace.nbytes, 0.01)
    pace.took(1, 0.01)  # says nothing of more
    pace.took(pace.nbytes, 0.3)
    assert pace.nbytes == 8 * least
    pace.took(pace.nbytes, 0.6)
    assert pace.nbytes == 4 * least
    pace.failed()
    assert pace.nbytes == least
    pace.took(least, 0.9)
    assert pace.nbytes == least


def test_an_upload_in_pieces_that_loses_one_becomes_no_entry(url, raw, monkeypatch):
    monkeypatch.setattr(redis_pieces, "MIN_PIECE_NBYTES", 10)
    index = redis_index.RedisIndex(url, 2.0, None)
    real = index.run

    def run(command, *arguments):
        if command == "join":
            raw.hdel(raw.keys("*new:*")[0], "0+1")
        return real(command, *arguments)

    monkeypatch.setattr(index, "run", run)
    assert index.reserve("100:x", 100, 60.0, []) == (True, 0)
    index.upload("100:x", 60.0, b"head", [memoryview(bytes(range(96)))])
    assert not index.publish("100:x", str(A), "5 1 raw=10", 1)
    assert raw.keys("*[cn]*:*") == []
    index.close()


def test_pieces_weigh_what_they_will_weigh_together_and_room_is_kept_while_they_come(url, raw, monkeypatch):
    monkeypatch.setattr(redis_pieces, "MIN_PIECE_NBYTES", 10)
    index = redis_index.RedisIndex(url, 2.0, None)
    real, seen = index.run, []

    def run(command, *arguments):
        result = real(command, *arguments)
        if command in ("renew", "join"):
            name = raw.keys("*new:*")[0]
            seen.append((sum(map(len, raw.hvals(name))), real("weigh"), raw.pttl(name) > 0))
        return result

    monkeypatch.setattr(index, "run", run)
    assert index.reserve("100:x", 100, 60.0, []) == (True, 0)
    index.upload("100:x", 60.0, b"head", [memoryview(bytes(range(96)))])
    assert len(seen) > 2
    assert all(held <= 100 == weighed and expires for held, weighed, expires in seen)
    assert raw.hgetall(raw.keys("*new:*")[0]) == {b"head": b"head", b"0": bytes(range(96))}
    assert index.publish("100:x", str(A), "5 1 raw=10", 1)
    index.close()
