"""Documents in the store's folder: read back whole, by tenant, with the vectors of the embedder that is asked."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragfuse import Settings
from ragfuse.serve.document_records import DOCUMENTS_FILE, DocumentRecord, DocumentRecords

PASSAGES = ["The northern light is kept by Ada.", "caf\u00e9 \ud800 \x00 'quoted'"]
PASSAGES_READ = [PASSAGES[0], "caf\u00e9 \ufffd 'quoted'"]


def record(id: str, name: str = "lights.txt") -> DocumentRecord:
    vectors = np.arange(len(PASSAGES) * 3, dtype=np.float32).reshape(len(PASSAGES), 3)
    return DocumentRecord(id, name, list(PASSAGES), PASSAGES[:1], {"tokens": 12, "seconds": 0.5}, vectors)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[DocumentRecords]:
    made = DocumentRecords(Settings(store=tmp_path), "minilm")
    yield made
    made.close()


def test_a_document_is_read_back_whole(records: DocumentRecords) -> None:
    records.add("s", record("a"))
    found, sent = records.read("s", "a"), record("a")
    assert found is not None
    assert found.vectors is not None
    assert np.array_equal(found.vectors, sent.vectors)
    assert replace(found, vectors=None) == replace(sent, vectors=None)


def test_a_tenant_has_its_own_and_one_of_a_name(records: DocumentRecords) -> None:
    for id, name in (("a", "one"), ("b", "two"), ("c", "one")):
        records.add("blue", record(id, name))
    records.add("red", record("a", "one"))
    assert (records.ids("blue"), records.ids("red"), records.ids("")) == (["b", "c"], ["a"], [])
    assert records.read("red", "b") is None
    records.delete("red", ["b", "a", "none"])
    assert (records.ids("blue"), records.ids("red")) == (["b", "c"], [])


def test_a_passage_is_claimed_until_it_is_in_a_document_of_its_tenant(records: DocumentRecords, tmp_path: Path) -> None:
    records.claim("blue", [*PASSAGES_READ, "a third"])
    records.claim("blue", PASSAGES_READ[:1])
    records.claim("red", ["a third"])
    later = DocumentRecords(Settings(store=tmp_path), "minilm")
    assert sorted(later.claims("blue")) == sorted([*PASSAGES_READ, "a third"])
    later.close()
    records.add("blue", record("a"))
    assert sorted(records.claims("blue")) == sorted([*PASSAGES_READ[1:], "a third"])
    records.disclaim("blue", ["a third", "none"])
    assert (records.claims("blue"), records.claims("red")) == (PASSAGES_READ[1:], ["a third"])


def test_vectors_of_another_embedder_are_not_returned(records: DocumentRecords, tmp_path: Path) -> None:
    records.add("s", record("a"))
    other = DocumentRecords(Settings(store=tmp_path), "other")
    found = other.read("s", "a")
    assert found is not None
    assert (found.passages, found.vectors) == (PASSAGES, None)
    other.close()


@pytest.mark.parametrize(
    "damage",
    [
        "vectors = x'00'",
        "vectors = x'0000c07f' || substr(vectors, 5)",  # not a number
        "vectors = 'text'",
        "passages = '[1, 2]'",
        "passages = '[]'",
        "passages = 'no JSON'",
        'counts = \'{"tokens": "many"}\'',
        "own = '{}'",
    ],
)
def test_a_damaged_document_is_a_missing_one(records: DocumentRecords, tmp_path: Path, damage: str) -> None:
    records.add("s", record("a"))
    records.add("s", record("b", "other"))
    connection = sqlite3.connect(tmp_path / DOCUMENTS_FILE)
    with connection:
        connection.execute(f"UPDATE documents SET {damage} WHERE id = 'a'")
    connection.close()
    assert records.read("s", "a") is None
    assert records.read("s", "b") is not None


def test_without_a_disk_nothing_is_written(tmp_path: Path) -> None:
    records = DocumentRecords(Settings(store=tmp_path / "store", disk_bytes=0), "minilm")
    records.add("s", record("a"))
    assert records.ids("s") == ["a"]
    records.close()
    assert not (tmp_path / "store").exists()
