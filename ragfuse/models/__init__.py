"""The included models, and one loader for model names, folders, files and loaded objects.

This package itself only maps model names to folders. `ragfuse.models.loader` imports transformers
and loads weights.
"""

from ragfuse.models.embedded import (
    EMBEDDED,
    MANIFEST,
    EmbeddedModel,
    ModelStatus,
    embedded,
    list_models,
    prepare,
    quietly,
    require_hub,
    resolve_embedder,
    resolve_llm,
)

__all__ = [
    "EMBEDDED",
    "MANIFEST",
    "EmbeddedModel",
    "ModelStatus",
    "embedded",
    "list_models",
    "prepare",
    "quietly",
    "require_hub",
    "resolve_embedder",
    "resolve_llm",
]
