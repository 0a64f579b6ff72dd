"""Words in, Prompt out: where chunks begin and end in a text, and which token stands where.

Tokenizer and chat template come in as callables; nothing here knows a model or a store, and nothing splits documents.
"""

from ragfuse.text.assemble import Assembler, Message
from ragfuse.text.chunks import ChunkSpan, KnownChunks, Marker, Piece, chunk_id, peel, pieces
from ragfuse.text.filler import filler_text, sample
from ragfuse.text.retrieved import RetrievalRuns

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
