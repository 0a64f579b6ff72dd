"""What the object tier asks an S3 server: how often, and for which bytes."""

import threading

import pytest

from tests.store.kit import encoded, key, kv
from tests.store.objects.kit import A, B
from tests.store.redis_server import until
from tests.store.s3_server import shared


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 1), (0, 3), (1, 2)])
def test_layers_of_a_known_object_are_one_range_read_of_their_bytes_alone(first, count):
    server = shared()
    tier, (meta, blobs) = server.tier(server.new_url()), encoded(kv(n=500))
    assert tier.write(A, meta, blobs)
    server.asked.clear()
    assert tier.read(A, first, count) is not None
    (request,) = server.asked
    begin, end = map(int, request.range.removeprefix("bytes=").split("-"))
    assert request.method == "GET"
    padding = 64 * count
    assert 0 <= end + 1 - begin - sum(blob.numel() for blob in blobs[first : first + count]) <= padding


def test_an_object_that_was_looked_up_by_another_process_costs_one_request_each_way():
    server, url = shared(), shared().new_url()
    assert server.tier(url).write(A, *encoded(kv(n=500)))
    tier = server.tier(url)
    server.asked.clear()
    assert A in tier.entries([A])
    assert tier.read(A, 0) is not None
    assert tier.entries([A])[A].hits == 1
    assert [request.method for request in server.asked] == ["GET", "GET"]


def test_an_unknown_object_is_header_and_layers_by_two_requests_and_by_one_where_it_is_small():
    server, url = shared(), shared().new_url()
    for n, requests in ((500, 2), (5, 1)):
        assert server.tier(url).write(A, *encoded(kv(n=n)))
        tier = server.tier(url)
        server.asked.clear()
        assert tier.read(A, 0) is not None
        assert len(server.asked) == requests


def test_a_header_longer_than_most_is_read_whole_and_the_next_one_at_once():
    server, url = shared(), shared().new_url()
    chunk, writer = kv(n_layers=120), server.tier(url, 1 << 24)
    assert writer.write(A, *encoded(chunk))
    assert writer.write(B, *encoded(chunk))
    tier = server.tier(url)
    for name, requests in ((A, 2), (B, 1)):
        server.asked.clear()
        assert tier.entries([name])[name].n_layers == 120
        assert len(server.asked) == requests
    assert tier.read(B, 119) is not None


def test_a_look_up_of_six_chunks_is_one_round_trip(server):
    url = server.new_url()
    assert server.tier(url).write(A, *encoded(kv()))
    tier, found = server.tier(url, timeout_s=30.0), []
    server.asked.clear()
    server.stand_still()
    thread = threading.Thread(target=lambda: found.append(tier.entries([A, *map(key, range(5))])))
    thread.start()
    until(lambda: len(server.asked) == 6)  # all asked before any is answered
    server.go_on()
    thread.join()
    assert set(found[0]) == {A}


def test_known_entries_are_given_without_asking():
    server = shared()
    tier = server.tier(server.new_url())
    assert tier.write(A, *encoded(kv()))
    server.asked.clear()
    assert set(tier.entries([A])) == {A}
    assert server.asked == []
