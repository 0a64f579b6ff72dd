"""The included models, and one loader for models given by name, folder, file or loaded object.

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
