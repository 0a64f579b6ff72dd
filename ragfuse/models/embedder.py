"""The embedder, which turns texts into unit vectors by a sentence-transformers model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragfuse.errors import InputError
from ragfuse.models.embedded import quietly, resolve_embedder


class Embedder:
    """An embedding model for texts, loaded on first use. Thread-safe: one thread embeds at a time.

    Args:
        name: Name of an included model, a Hugging Face id or a local folder.
        home: Folder of prepared models.
    """

    def __init__(self, name: str, home: Path) -> None:
        self.name = Path(name).name
        self._source, self._home, self._lock = name, home, threading.Lock()
        self._loaded: Any = None

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, with special tokens, without truncation."""
        model = self._model()
        with self._lock:
            found = model.tokenizer(
                list(texts), add_special_tokens=True, truncation=False, verbose=False
            )
        return [len(ids) for ids in found["input_ids"]]

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens embedded per text. Further tokens are ignored."""
        return int(self._model().max_seq_length)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of the texts: float32 [n, dims], each vector of length 1."""
        model = self._model()
        with self._lock:
            found = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(found, dtype=np.float32)

    def _model(self) -> Any:
        with self._lock:
            if self._loaded is None:
                try:
                    from sentence_transformers import SentenceTransformer
                except ImportError as error:
                    raise InputError(
                        "Embeddings need sentence-transformers. Run: pip install"
                        " 'ragfuse-kv[models]'"
                    ) from error
                source = resolve_embedder(self._source, self._home)
                with quietly(source):
                    self._loaded = SentenceTransformer(str(source), device="cpu")
            return self._loaded
