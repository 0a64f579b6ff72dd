"""From text and messages to a `Prompt`: finds chunks in a text and tokenises everything into segments.

Tokenizer and chat template are passed in as callables. This package knows no model and no store, and does not split
documents.
"""

from ragfuse.text.assemble import Assembler, Message
from ragfuse.text.chunks import ChunkSpan, KnownChunks, Marker, Piece, chunk_id, peel, pieces
from ragfuse.text.filler import filler_text, sample
from ragfuse.text.retrieval_runs import RetrievalRuns

__all__ = [
    "Assembler",
    "ChunkSpan",
    "KnownChunks",
    "Marker",
    "Message",
    "Piece",
    "RetrievalRuns",
    "chunk_id",
    "filler_text",
    "peel",
    "pieces",
    "sample",
]
