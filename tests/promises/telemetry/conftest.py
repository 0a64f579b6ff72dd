"""An engine whose store has two long chunks, and prompts over them."""

from __future__ import annotations

from typing import Any

import pytest

from ragfuse.text import Piece

SECRET = (
    "Agnes Worth kept the book of ships in the harbour of Port Elling until her death in 1881. "
)


def asking(question: str) -> list[Any]:
    chunks = [
        Piece(f"{SECRET * 3}Volume {number}.", "chunk", f"letters-{number}.txt")
        for number in range(2)
    ]
    return [("user", (Piece("Read this.\n"), *chunks, Piece(question)))]


@pytest.fixture
def ingested(engine):
    prompt = asking("Who?")
    chunks = [(piece.text, piece.source) for piece in prompt[0][1] if piece.kind == "chunk"]
    engine.ingest(chunks, engine.prefix(prompt))
    engine.flush()
    return engine


@pytest.fixture
def warm(ingested):
    """The same with the chunks on disk alone."""
    memory = ingested.store.tier("memory")
    memory.delete([entry.key for entry in memory.list()])
    return ingested
