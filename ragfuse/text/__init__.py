"""Build a `Prompt` from text and messages: render, tokenise, and find chunks in the token ids.

The tokenizer is passed in. This package knows no model and no store.
"""

from ragfuse.text.chat_messages import Piece
from ragfuse.text.filler import filler_text, sample
from ragfuse.text.retrieval_runs import RetrievalRuns

__all__ = [
    "Piece",
    "RetrievalRuns",
    "filler_text",
    "sample",
]
