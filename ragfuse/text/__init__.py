"""Words in, Prompt out: where chunks begin and end in a text, and which token stands where.

Tokenizer and chat template come in as callables; nothing here knows a model or a store, and nothing splits documents.
"""

from ragfuse.text.assemble import Assembler, Message
from ragfuse.text.chunks import KnownChunks, Marker, Piece, Span, chunk_id, peel, pieces
from ragfuse.text.retrieved import RetrievalRuns
from ragfuse.text.stand_in import sample, stand_in

__all__ = [
    "Assembler",
    "KnownChunks",
    "Marker",
    "Message",
    "Piece",
    "RetrievalRuns",
    "Span",
    "chunk_id",
    "peel",
    "pieces",
    "sample",
    "stand_in",
]
