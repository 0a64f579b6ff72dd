"""Reuse the KV caches of retrieved chunks instead of prefilling them again."""

from typing import TYPE_CHECKING

import lazy_loader

from ragfuse.process.folders import give_temporary_files_a_place

if TYPE_CHECKING:
    from ragfuse.engine.answer_stream import AnswerStream
    from ragfuse.engine.ask import Ask
    from ragfuse.engine.engine import Engine
    from ragfuse.errors import InputError, ModelError, RagFuseError, SettingsError, StoreError
    from ragfuse.schemas.pml_template import PMLTemplate
    from ragfuse.settings import Settings
    from ragfuse.telemetry.metrics import metrics
    from ragfuse.text import Piece, RetrievalRuns
    from ragfuse.text.chat_messages import ChatMessage
    from ragfuse.types.answer import Answer, Ingested, ToolCall, Trace
    from ragfuse.types.grammar import Grammar
    from ragfuse.types.prompt import Prompt

give_temporary_files_a_place()

__all__ = [
    "Answer",
    "AnswerStream",
    "Ask",
    "ChatMessage",
    "Engine",
    "Grammar",
    "Ingested",
    "InputError",
    "ModelError",
    "PMLTemplate",
    "Piece",
    "Prompt",
    "RagFuseError",
    "RetrievalRuns",
    "Settings",
    "SettingsError",
    "StoreError",
    "ToolCall",
    "Trace",
    "metrics",
]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "engine.answer_stream": ["AnswerStream"],
        "engine.ask": ["Ask"],
        "engine.engine": ["Engine"],
        "errors": [
            "InputError",
            "ModelError",
            "RagFuseError",
            "SettingsError",
            "StoreError",
        ],
        "schemas.pml_template": ["PMLTemplate"],
        "settings": ["Settings"],
        "telemetry.metrics": ["metrics"],
        "text": ["Piece", "RetrievalRuns"],
        "text.chat_messages": ["ChatMessage"],
        "types.answer": ["Answer", "Ingested", "ToolCall", "Trace"],
        "types.grammar": ["Grammar"],
        "types.prompt": ["Prompt"],
    },
)
"""Public names are imported on first use, so `import ragfuse` loads neither torch nor transformers.
"""
