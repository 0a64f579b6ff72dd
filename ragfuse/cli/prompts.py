"""How the command line asks: an instruction, the chunks, the question. The same text before the first chunk always."""

from __future__ import annotations

from collections.abc import Sequence

from ragfuse.text import Piece

INSTRUCTION = "Answer the question in a few words, using only the passages below.\n\n"


def rag_messages(question: str, chunks: Sequence[tuple[str, str]]) -> list[tuple[str, tuple[Piece, ...]]]:
    """One user message with (text, source) chunks as exact pieces; with no question, what an ingest needs."""
    parts = [Piece(INSTRUCTION)]
    for text, source in chunks:
        parts += [Piece(text, "chunk", source), Piece("\n\n")]
    return [("user", (*parts, Piece(f"Question: {question}")))]
