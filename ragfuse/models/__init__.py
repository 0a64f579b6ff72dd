"""The included models, and one loader for models given by name, folder, file or loaded object.

This package itself only maps model names to folders. `ragfuse.models.loader` imports transformers
and loads weights.
"""

from ragfuse.models.embedded import (
    MANIFEST,
    EmbeddedModel,
    embedded,
    list_models,
    prepare,
    quietly,
    resolve_embedder,
    resolve_llm,
)

__all__ = [
    "MANIFEST",
    "EmbeddedModel",
    "embedded",
    "list_models",
    "prepare",
    "quietly",
    "resolve_embedder",
    "resolve_llm",
]
