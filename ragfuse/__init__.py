"""Fuse cached chunks instead of prefilling them again: RAG whose first token comes several times sooner."""

from ragfuse.core import Answer, Prompt, Trace
from ragfuse.engine import Ask, Engine, Ingested
from ragfuse.errors import InputError, ModelError, RagFuseError, SettingsError, StoreError
from ragfuse.settings import Settings
from ragfuse.streaming import AnswerStream
from ragfuse.text import Piece

__all__ = [
    "Answer",
    "AnswerStream",
    "Ask",
    "Engine",
    "Ingested",
    "InputError",
    "ModelError",
    "Piece",
    "Prompt",
    "RagFuseError",
    "Settings",
    "SettingsError",
    "StoreError",
    "Trace",
]
