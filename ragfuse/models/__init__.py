"""Models as people have them: the embedded ones, and one loader for names, folders, files and loaded objects.

Only names and folders are known here; what loads weights is in `ragfuse.models.loader`, which imports transformers.
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
