"""The vectors of the demo's passages, kept from one run to the next. What is damaged or of other passages is none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragfuse.models.weight_files import identity
from ragfuse.store.access import make_root, open_file
from ragfuse.types.keys import digest

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class KeptVectors:
    """The file of the vectors of some passages. Its name says which, and has the digest of what it holds.

    Args:
        folder: Where it lies.
        name: Name of the set of passages; there is one file for each.
        key: Digest of the passages and of the embedder; "" where the embedder's files are not known: nothing is kept.
        count: Number of passages.
    """

    folder: Path
    name: str
    key: str
    count: int

    @classmethod
    def of(cls, folder: Path, name: str, texts: Sequence[str], embedder: Path | str) -> KeptVectors:
        """Return the file for these passages.

        Args:
            folder: Where it lies.
            name: Name of the set of passages.
            texts: The passages.
            embedder: The embedder's folder, or its id, whose files are not known.
        """
        files, _ = identity([embedder], {}) if isinstance(embedder, Path) else ("", 0)
        key = digest("vectors", files, version("sentence-transformers"), *texts) if files else ""
        return cls(folder, name, key, len(texts))

    def read(self) -> Vectors | None:
        """Return the vectors, [count, dims]; None if they are not kept, or not as they were written."""
        for path in self.folder.glob(f"{self.name}-{self.key}-*.npy") if self.key else ():
            try:
                found = np.load(path, allow_pickle=False)
            except (OSError, ValueError, EOFError):
                continue
            if isinstance(found, np.ndarray) and self._path_of(found) == path and len(found) == self.count:
                return found
        return None

    def write(self, vectors: Vectors) -> None:
        """Keep the vectors, in place of those that the set had before; where that fails, they are not kept."""
        if not self.key:
            return
        path = self._path_of(vectors)
        partial = self.folder / f".{path.name}.{os.getpid()}"
        try:
            make_root(self.folder)
            with os.fdopen(open_file(partial, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                np.save(file, vectors, allow_pickle=False)
            for old in self.folder.glob(f"{self.name}-*.npy"):
                old.unlink(missing_ok=True)
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _path_of(self, vectors: Vectors) -> Path:
        checked = digest("vectors", str(vectors.dtype), str(vectors.shape), vectors.tobytes())
        return self.folder / f"{self.name}-{self.key}-{checked}.npy"
