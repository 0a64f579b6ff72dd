"""Documents in the store's folder: damaged ones are missing ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ragfuse import Settings
from ragfuse.serve.records import DOCUMENTS_FILE, DocumentRecords, StoredDocument

PASSAGES = ["The northern light is kept by Ada.", "caf\u00e9 'quoted'"]
VECTORS = np.arange(len(PASSAGES) * 3, dtype=np.float32).reshape(len(PASSAGES), 3)


def record(id: str, name: str = "lights.txt") -> StoredDocument:
    return StoredDocument(id=id, name=name, passages=PASSAGES)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[DocumentRecords]:
    made = DocumentRecords(Settings(store=tmp_path), "minilm")
    yield made
    made.close()


@pytest.mark.parametrize(
    "damage",
    [
        "vectors = x'00'",
        "document = '{}'",
    ],
)
def test_a_damaged_document_is_a_missing_one(
    records: DocumentRecords, tmp_path: Path, damage: str
) -> None:
    records.add("s", record("a"), VECTORS)
    records.add("s", record("b", "other"), VECTORS)
    connection = sqlite3.connect(tmp_path / DOCUMENTS_FILE)
    with connection:
        connection.execute(f"UPDATE embedded SET {damage} WHERE id = 'a'")
    connection.close()
    assert records.read("s", "a") is None
    assert records.read("s", "b") is not None
