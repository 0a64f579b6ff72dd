"""The object tier against servers that stop, stand still, are slow, or are not there."""

import logging

import torch

from tests.store.kit import encoded, key, kv
from tests.store.objects.kit import A, B, impatient, warnings
from tests.store.redis_server import until
from tests.store.slow_link import SlowLink, large


def test_a_server_that_stops_costs_one_attempt_and_then_nothing(server, caplog):
    tier = server.tier(server.new_url(), cool_down_s=3600.0)
    for i in range(6):
        assert tier.write(key(i), *encoded(kv()))
    server.stop()
    before = tier.breaker.attempts
    with caplog.at_level(logging.WARNING, "ragfuse.store"):
        assert [tier.read(key(i), layer) for i in range(6) for layer in range(3)] == [None] * 18
        assert tier.entries([B]) == {}
        assert not tier.write(B, *encoded(kv()))
        assert tier.delete([key(0)]) == 0
    assert tier.breaker.attempts == before + 1
    # the read that found out, and the write and the delete that were left out
    assert (tier.counts["failed"], tier.counts["corrupt"]) == (3, 0)
    assert len(warnings(caplog)) == 1
    server.start()


def test_a_server_that_comes_back_is_used_again(server):
    tier = server.tier(server.new_url(), cool_down_s=0.0)
    assert tier.write(A, *encoded(kv()))
    server.stop()
    assert tier.read(A, 0) is None
    assert not tier.write(B, *encoded(kv()))
    server.start()
    assert tier.read(A, 0) is not None
    assert tier.write(B, *encoded(kv()))
    assert set(tier.entries()) == {A, B}
    assert not tier.breaker.is_open


def test_what_is_known_without_asking_says_nothing_of_a_server_that_is_down(server, caplog):
    tier = server.tier(server.new_url(), cool_down_s=0.0)
    assert tier.write(A, *encoded(kv()))
    server.stop()
    caplog.set_level(logging.INFO, "ragfuse.store")
    caplog.clear()
    for _ in range(3):
        assert tier.read(A, 0) is None
        attempts = tier.breaker.attempts
        tier.entries([A])
        assert (tier.breaker.is_open, tier.breaker.attempts) == (True, attempts)
    assert [record.levelname for record in caplog.records if record.name == "ragfuse.store"] == ["WARNING"]
    server.start()
    assert tier.read(A, 0) is not None
    assert not tier.breaker.is_open


def test_headers_that_nobody_gives_are_a_failure_and_no_answer(server):
    url = server.new_url()
    tier = server.tier(url, cool_down_s=0.0)
    server.stop()
    assert tier.entries([A, B]) == {}
    assert tier.breaker.is_open
    assert tier.entries([A, B]) == {}
    assert tier.breaker.is_open
    server.start()


def test_a_server_that_stands_still_is_a_miss_in_time(server):
    tier = server.tier(server.new_url(), cool_down_s=3600.0)
    assert tier.write(A, *encoded(kv()))
    before = len(server.asked)
    server.stand_still()
    with impatient(tier):
        assert [tier.read(A, layer) for layer in range(3)] == [None] * 3
    assert len(server.asked) == before + 1
    assert tier.breaker.is_open
    server.go_on()


def test_what_takes_longer_than_the_timeout_over_a_slow_link_is_written_and_read(server):
    url, link = server.new_url(), SlowLink(server.port, 6e6)
    tier = server.tier(url, 1 << 30, port=link.port)
    meta, blobs = large(6 << 20, 1)
    assert tier.entries() == {}
    with impatient(tier):
        assert tier.write(A, meta, blobs)
        assert torch.equal(tier.read(A, 0)[1], blobs[0])
    assert (tier.counts["failed"], tier.breaker.is_open) == (0, False)
    link.close()


def test_a_server_that_is_not_there_at_opening_is_no_error(server, caplog):
    url = server.new_url()
    server.stop()
    with caplog.at_level(logging.WARNING, "ragfuse.store"):
        tier = server.tier(url, cool_down_s=0.0)
    assert len(warnings(caplog)) == 1
    assert (tier.nbytes, tier.entries(), tier.read(A, 0), tier.write(A, *encoded(kv()))) == (0, {}, None, False)
    server.start()
    assert tier.write(A, *encoded(kv()))
    assert tier.read(A, 0) is not None


def test_an_object_whose_put_was_not_answered_counts_once_it_is_seen(server):
    tier = server.tier(server.new_url(), cool_down_s=0.0)
    assert tier.write(B, *encoded(kv()))
    unit = tier.nbytes
    server.stand_still()
    with impatient(tier):
        assert not tier.write(A, *encoded(kv()))
    server.go_on()
    until(lambda: A in tier.entries([A]))
    assert tier.nbytes == 2 * unit
