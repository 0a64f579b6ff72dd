"""Fuse cached chunks instead of prefilling them again: RAG whose first token comes several times sooner."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfuse.admin.byte_store import ByteStore
    from ragfuse.engine.answer_stream import AnswerStream
    from ragfuse.engine.engine import Engine, Ingested
    from ragfuse.engine.options import Ask
    from ragfuse.errors import InputError, ModelError, RagFuseError, SettingsError, StoreError
    from ragfuse.schemas.pml_template import PMLTemplate
    from ragfuse.settings import Settings
    from ragfuse.telemetry.prometheus import metrics
    from ragfuse.text import Piece, RetrievalRuns
    from ragfuse.text.chat_messages import ChatMessage
    from ragfuse.types.answer import Answer, ToolCall, Trace
    from ragfuse.types.grammar import Grammar
    from ragfuse.types.prompt import Prompt

__all__ = [
    "Answer",
    "AnswerStream",
    "Ask",
    "ByteStore",
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

_HOMES = MappingProxyType(
    {
        **dict.fromkeys(("Answer", "ToolCall", "Trace"), "types.answer"),
        **dict.fromkeys(("InputError", "ModelError", "RagFuseError", "SettingsError", "StoreError"), "errors"),
        **dict.fromkeys(("Engine", "Ingested"), "engine.engine"),
        "AnswerStream": "engine.answer_stream",
        "Ask": "engine.options",
        "Grammar": "types.grammar",
        "ByteStore": "admin.byte_store",
        **dict.fromkeys(("Piece", "RetrievalRuns"), "text"),
        "Settings": "settings",
        "Prompt": "types.prompt",
        "PMLTemplate": "schemas.pml_template",
        "ChatMessage": "text.chat_messages",
        "metrics": "telemetry.prometheus",
    }
)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: `import ragfuse` alone loads neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ragfuse' has no attribute '{name}'")
    globals()[name] = found = getattr(import_module(f"ragfuse.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
