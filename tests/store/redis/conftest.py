"""Tiers on databases of their own of a server that all tests share, and a server of a test's own."""

import pytest

from ragfuse.plan.evict import lru
from ragfuse.store.redis import RedisTier
from tests.store.kit import encoded, key, kv, ticks
from tests.store.redis_server import RedisServer, fresh_url

A = key("a")


@pytest.fixture
def url():
    return fresh_url()


@pytest.fixture
def raw(url):
    import redis

    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture
def open_tier(url):
    """open_tier(capacity, options): a tier on this test's database, patient by default; all are closed at the end."""
    made = []

    def make(capacity=1 << 20, **options):
        options = {"timeout_s": 30.0, **options}
        made.append(RedisTier(options.pop("url", url), capacity, options.pop("evict", lru), **options))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def tier(open_tier):
    tier = open_tier(clock=ticks())
    assert tier.write(A, *encoded(kv()))
    return tier


@pytest.fixture
def server(tmp_path):
    """A server of the test's own."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def unit(open_tier):
    """Bytes of one entry of `kv()`."""
    tier = open_tier(url=fresh_url())
    assert tier.write(A, *encoded(kv()))
    return tier.nbytes
