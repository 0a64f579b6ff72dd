"""A disk tier of very many entries: nothing it does for one entry looks at all of them."""

import sqlite3
import threading

import psutil
import pytest

from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, index
from ragfuse.store.database import Database
from ragfuse.store.upkeep import SMALL
from ragfuse.types.keys import ChunkKey, digest
from tests.store.kit import encoded, key, kv

ROW = "INSERT INTO entries(key, sizes, n_tokens, n_layers, nbytes, last_used) VALUES (?, 'raw=9000', 160, 30, 10000, ?)"
MANY = SMALL + 50
MODEL, CONTEXT = digest("model"), digest("context")


def nth(i: int) -> ChunkKey:
    return ChunkKey(MODEL, digest("tokens", str(i)), CONTEXT if i % 2 else f"~{CONTEXT}")


def filled(path, n: int, **options) -> DiskTier:
    """A tier that was opened with rows of `n` entries, used one after the other; they have no files."""
    tier = DiskTier(path, 1 << 50, lru)
    with tier._index.write() as transaction:
        transaction.executemany(ROW, ((str(nth(i)), 1e9 + i) for i in range(n)))
    tier.close()
    return DiskTier(path, options.pop("capacity", 1 << 50), options.pop("evict", lru))


def test_a_full_tier_shows_the_evictor_the_oldest_few_and_more_only_if_they_do_not_suffice(tmp_path):
    seen = []
    tier = filled(
        tmp_path, MANY, capacity=10000 * MANY, evict=lambda entries: seen.append(len(entries)) or lru(entries)
    )
    assert tier.write(key("a"), *encoded(kv()))
    assert sum(seen) <= 512
    assert set(tier.entries([nth(i) for i in range(3)])) == {nth(1), nth(2)}
    tier.close()


def test_an_evictor_that_wants_somebody_younger_is_shown_them(tmp_path):
    shown = []

    def picky(entries):
        shown.append(len(entries))
        return [entry.key for entry in entries if entry.key in (nth(700), nth(2000))]

    tier = filled(tmp_path, MANY, capacity=10000 * MANY, evict=picky)
    assert tier.write(key("a"), *encoded(kv()))
    assert set(tier.entries([nth(0), nth(700), nth(2000)])) == {nth(0), nth(2000)}
    assert len(shown) == 2
    assert sum(shown) < 2000
    tier.close()


def test_weighing_and_choosing_are_answered_from_what_is_kept_sorted(tmp_path):
    tier = filled(tmp_path, 10)
    tier.close()
    connection = sqlite3.connect(tmp_path / "index.sqlite")
    for sql in (index._NBYTES, index._ENTRIES + index._OLDEST, index._ENTRIES + index._WITH_KEYS):
        arguments = ("[]",) * sql.count("?")
        plan = [row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", arguments)]
        assert plan
        assert not [step for step in plan if step == "SCAN entries" or "TEMP B-TREE FOR ORDER" in step], plan
    connection.close()


def test_a_listing_is_read_page_by_page_so_that_others_come_in_between(tmp_path, monkeypatch):
    tier, pages = filled(tmp_path, MANY), []
    query, here = Database.query, threading.get_ident()

    def noted(self, *arguments):
        rows = query(self, *arguments)
        if threading.get_ident() == here:  # other tests' engines may still be at work
            pages.append(len(rows))
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(Database, "query", noted)
        listed = list(tier.entries())
    assert listed == [nth(i) for i in range(MANY)]
    assert sum(pages) == MANY
    assert max(pages) <= 1000
    tier.close()


def test_bytes_are_counted_through_writing_replacing_and_deleting(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20, lru)
    for name, n in (("a", 5), ("b", 9), ("a", 30), ("c", 5)):
        assert tier.write(key(name), *encoded(kv(n=n)))
    tier.delete([key("b"), key("x")])
    summed = sum(entry.nbytes for entry in tier.entries().values())
    assert tier.nbytes == summed
    assert len(tier._index) == 2
    tier.close()


def test_an_index_of_before_the_counting_is_counted_when_it_is_opened(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20, lru)
    tier.write(key("a"), *encoded(kv()))
    wanted = tier.nbytes
    tier.close()
    with sqlite3.connect(tmp_path / "index.sqlite") as connection:
        for name in ("more", "other", "less"):
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("DROP TABLE total")
    connection.close()
    tier = DiskTier(tmp_path, 1 << 20, lru)
    assert (tier.nbytes, len(tier._index)) == (wanted, 1)
    tier.close()


@pytest.mark.slow
def test_opening_a_large_store_looks_at_no_file_and_tidying_looks_at_all(tmp_path, caplog):
    tier = filled(tmp_path, MANY)
    assert tier.counts["corrupt"] == 0
    tier.write(key("whole"), *encoded(kv()))
    assert tier.tidy().orphans == MANY
    assert set(tier.entries()) == {key("whole")}
    tier.close()


@pytest.mark.slow
def test_after_the_machine_went_down_a_large_store_is_looked_through(tmp_path):
    tier = filled(tmp_path, MANY)
    with tier._index.write() as transaction:
        tier._index.write_note(transaction, "boot", "an earlier one")
    tier.close()
    tier = DiskTier(tmp_path, 1 << 50, lru)
    assert tier.entries() == {}
    assert tier.counts["corrupt"] == MANY
    tier.close()


@pytest.mark.slow
def test_a_million_entries_take_less_than_200_mb_of_memory(tmp_path):
    before = psutil.Process().memory_info().rss
    tier = filled(tmp_path, 1_000_000)
    for start in range(0, 1_000_000, 1000):
        assert len(tier.entries([nth(start + i) for i in range(6)])) == 6
    tier.capacity = tier.nbytes
    assert tier.write(key("a"), *encoded(kv()))
    assert psutil.Process().memory_info().rss - before < 200e6
    assert len(tier._index) == 1_000_000  # one has made room for it
    tier.close()
