"""The included models, and one loader for model names, folders, files and loaded objects.

Importing this package imports only names and folders; `ragfuse.models.loader` loads weights and
imports transformers.
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
