"""Code that the LangChain, LlamaIndex and Haystack integrations share.

Each integration implements its framework's base class. This package finds the engine or server,
converts the options of a call, and reads documents. Torch is imported only if the model runs in
this process.
"""

from ragfuse.adapters.documents import DocumentReader, Progress, shown, source_of
from ragfuse.adapters.options import CALL_OPTIONS, ask_of, text_only
from ragfuse.adapters.place import Place, engine_of, ready
from ragfuse.remote.remote_engine import Answerer

__all__ = [
    "CALL_OPTIONS",
    "Answerer",
    "DocumentReader",
    "Place",
    "Progress",
    "ask_of",
    "engine_of",
    "ready",
    "shown",
    "source_of",
    "text_only",
]
