"""What the integrations of all frameworks share: where the model is, the options of a call,
documents, usage and trace.

An integration is its framework's base class over this. Torch is loaded when a model of this process
is asked.
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
