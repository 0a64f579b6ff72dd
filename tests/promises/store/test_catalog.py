"""The book remembers profiles and texts across processes and writers."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragfuse.errors import StoreError
from ragfuse.store import Catalog


@pytest.fixture
def book(tmp_path):
    with Catalog(tmp_path).strict as book:
        yield book


def test_a_profile_comes_back_and_a_later_one_replaces_it(book):
    profile = {"ratio": 0.15, "layers": [1, 2], "name": "é", "none": None}
    assert book.get("model/x", dict) is None
    book.put("model/x", profile)
    book.put("machine", {"a": 1})
    assert book.get("model/x", dict) == profile
    book.put("model/x", {"ratio": 0.2})
    assert book.get("model/x", dict) == {"ratio": 0.2}
    assert book.names() == ["machine", "model/x"]


def test_texts_come_back_by_model_in_order(book):
    book.add_texts("m", [("k2", "zwei\0\n", "b.txt"), ("k1", "一", "a.txt")])
    book.add_texts("other", [("k1", "else", "a.txt")])
    assert book.texts("m") == [("k2", "zwei\0\n", "b.txt"), ("k1", "一", "a.txt")]
    assert [text.key for text in book.texts("other")] == ["k1"]
    assert book.texts("nobody") == []


def test_deleting_forgets_what_matches_all_that_is_given(book):
    def fill():
        book.delete_texts()
        book.add_texts("m", [("k1", "1", "a"), ("k1", "1", "b"), ("k2", "2", "a")])
        book.add_texts("n", [("k1", "1", "a")])

    def left():
        return [(model, text.key, text.source) for model in "mn" for text in book.texts(model)]

    fill()
    assert book.delete_texts("m", source="a") == 2
    assert left() == [("m", "k1", "b"), ("n", "k1", "a")]
    fill()
    assert book.delete_texts("m", keys=["k1", "k9"]) == 2
    assert left() == [("m", "k2", "a"), ("n", "k1", "a")]
    fill()
    assert book.delete_texts("m") == 3
    fill()
    assert book.delete_texts(source="a") == 3
    assert book.delete_texts(keys=[]) == 0
    assert left() == [("m", "k1", "b")]


def test_concurrent_writers_lose_nothing(book, tmp_path):
    with Catalog(tmp_path).strict as other, ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda i: (book, other)[i % 2].add_texts("m", [(f"k{i}", "t", "s")]), range(60)
            )
        )
    assert {text.key for text in book.texts("m")} == {f"k{i}" for i in range(60)}


def test_a_book_that_cannot_be_read_says_where_and_what_to_do(book, tmp_path):
    with sqlite3.connect(tmp_path / "catalog.sqlite") as connection:
        connection.execute("DROP TABLE texts")
    connection.close()
    with pytest.raises(StoreError, match=r"catalog\.sqlite.*RAGFUSE_HOME"):
        book.texts("m")
