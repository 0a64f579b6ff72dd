"""Build a `Prompt` from text and messages: render, tokenise, and find chunks in the token ids.

Tokenizer and chat template are passed in as callables. This package knows no model and no store,
and does not split documents.
"""

from ragfuse.text.assemble import Assembler, Message
from ragfuse.text.chat_messages import Piece
from ragfuse.text.filler import filler_text, sample
from ragfuse.text.retrieval_runs import RetrievalRuns

__all__ = [
    "Assembler",
    "Message",
    "Piece",
    "RetrievalRuns",
    "filler_text",
    "sample",
]
