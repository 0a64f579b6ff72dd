"""Fuse cached chunks instead of prefilling them again: RAG whose first token comes several times sooner."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfuse.asking import Ask
    from ragfuse.bytestore import ByteStore
    from ragfuse.core import Answer, Prompt, ToolCall, Trace
    from ragfuse.engine import Engine, Ingested
    from ragfuse.errors import InputError, ModelError, RagFuseError, SettingsError, StoreError
    from ragfuse.grammar import Grammar
    from ragfuse.metering import metrics
    from ragfuse.prompting import Turn
    from ragfuse.settings import Settings
    from ragfuse.streaming import AnswerStream
    from ragfuse.text import Piece, PMLTemplate, RetrievalRuns

__all__ = [
    "Answer",
    "AnswerStream",
    "Ask",
    "ByteStore",
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
    "Turn",
    "metrics",
]

_HOMES = MappingProxyType(
    {
        **dict.fromkeys(("Answer", "Prompt", "ToolCall", "Trace"), "core"),
        **dict.fromkeys(("InputError", "ModelError", "RagFuseError", "SettingsError", "StoreError"), "errors"),
        **dict.fromkeys(("Engine", "Ingested"), "engine"),
        "AnswerStream": "streaming",
        "Ask": "asking",
        "Grammar": "grammar",
        "ByteStore": "bytestore",
        **dict.fromkeys(("PMLTemplate", "Piece", "RetrievalRuns"), "text"),
        "Settings": "settings",
        "Turn": "prompting",
        "metrics": "metering",
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
