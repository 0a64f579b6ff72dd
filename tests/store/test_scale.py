"""A disk tier of very many entries: making room for one does not show the evictor all of them."""

from __future__ import annotations

import pytest

from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier
from ragfuse.types.keys import ChunkKey, digest
from tests.store.kit import encoded, key, kv

ROW = """INSERT INTO entries(key, sizes, n_tokens, n_layers, nbytes, last_used)
    VALUES (?, '{"raw": 10000}', 160, 30, 10000, ?)"""
MANY = 4000
MODEL = digest("model")


def nth(i: int) -> ChunkKey:
    return ChunkKey(MODEL, digest("tokens", str(i)))


@pytest.fixture
def tier(tmp_path):
    """A full tier with rows of entries, used one after the other; they have no files."""
    tier = DiskTier(tmp_path, 10000 * MANY, lru)
    with tier._index.write() as transaction:
        transaction.executemany(ROW, ((str(nth(i)), 1e9 + i) for i in range(MANY)))
    yield tier
    tier.close()


def test_a_full_tier_shows_the_evictor_the_oldest_few_and_more_only_if_they_do_not_suffice(tier):
    seen = []
    tier._evict = lambda entries: lru(seen.append(each) or each for each in entries)
    assert tier.put(key("a"), *encoded(kv()))
    assert len(seen) < 10
    assert set(tier.stat([nth(i) for i in range(3)])) == {nth(1), nth(2)}
