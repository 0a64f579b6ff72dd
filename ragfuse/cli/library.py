"""The document index: one file with vectors and texts, replaced atomically."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ragfuse.cli.files import is_in
from ragfuse.errors import InputError, SettingsError
from ragfuse.models import quietly, resolve_embedder
from ragfuse.settings import Settings
from ragfuse.store.folder import make_root, open_file
from ragfuse.types.keys import digest

CHUNKS_A_BATCH = 128
"""Number of chunks embedded per batch."""


def index_of(docs: Path) -> str:
    """Return the name of the index for a file or folder given as `--docs`."""
    return f"docs-{digest('docs', str(docs.resolve()))[:12]}"


class Library:
    """One search index: chunks of documents with their vectors."""

    def __init__(self, settings: Settings, name: str) -> None:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise SettingsError(f"An index name has only letters, digits, - and _; found '{name}'.")
        if settings.chunk_overlap >= settings.chunk_tokens:
            raise SettingsError(
                f"chunk_overlap ({settings.chunk_overlap}) must be less than chunk_tokens"
                f" ({settings.chunk_tokens})."
            )
        self.settings, self.name = settings, name
        self.file = settings.home / "indexes" / f"{name}.safetensors"

    def update(self, paths: Sequence[Path], chunks: Iterable[tuple[str, str]]) -> None:
        """Replace the chunks of the documents at `paths` by `chunks`.

        Only new chunks are embedded. Old chunks that are not in `chunks` are removed. After an
        interruption, the vectors computed so far are saved.

        Args:
            paths: Files and folders.
            chunks: (text, source) of each chunk.
        """
        from langchain_core.documents import Document
        from langchain_core.indexing import InMemoryRecordManager, index

        try:
            make_root(self.file.parent)
            with FileLock(self.file.with_suffix(".lock"), mode=0o600):
                store = self._open(*self._read())
                records = InMemoryRecordManager(self.name)
                records.records = {
                    id: {"group_id": None, "updated_at": 0.0}
                    for id, document in store.docstore._dict.items()
                    if is_in(document.metadata["source"], paths)
                }
                documents = (Document(text, metadata={"source": source}) for text, source in chunks)
                try:
                    index(
                        documents,
                        records,
                        store,
                        batch_size=CHUNKS_A_BATCH,
                        cleanup="full",
                        key_encoder="blake2b",
                    )
                finally:
                    self._save(store)
        except (OSError, SafetensorError) as error:
            raise SettingsError(
                f"The index cannot be written to '{self.file}' ({error}). Free space there or set"
                " RAGFUSE_HOME to a writable folder, then run the command again."
            ) from error

    def chunks(self) -> list[tuple[str, str]]:
        """Return (text, source) of all chunks, without loading the embedder or LangChain."""
        return [(text, source) for _, text, source in self._read()[1]]

    def sources(self) -> dict[str, int]:
        """Return the number of chunks per document, sorted by path."""
        return dict(sorted(Counter(source for _, source in self.chunks()).items()))

    def require(self) -> None:
        """Raise InputError if the index is empty."""
        if not self.chunks():
            option = "" if self.name == "default" else f" --index {self.name}"
            names = sorted(file.stem for file in self.file.parent.glob("*.safetensors"))
            there = (
                f" Other indexes: {', '.join(names)} (choose one with --index)." if names else ""
            )
            raise InputError(
                f"Index '{self.name}' is empty.{there} Fill the index: ragfuse ingest PATH{option}"
            )

    def search(self, question: str) -> list[tuple[str, str]]:
        """Return (text, source) of the `top_k` chunks closest to a question, each text once."""
        saved, chunks = self._read()
        if not chunks:
            return []
        sources = {text: source for _, text, source in reversed(chunks)}
        copies = len(chunks) - len(sources)
        most = self.settings.top_k
        found = self._open(saved, chunks).similarity_search(question, k=most + copies)
        texts = dict.fromkeys(each.page_content for each in found)
        return [(text, sources[text]) for text in texts][:most]

    @cached_property
    def embeddings(self) -> Any:
        """LangChain's embeddings with the configured embedder, loaded on first use."""
        from langchain_huggingface import HuggingFaceEmbeddings

        source = resolve_embedder(self.settings.embedder, self.settings.home)
        with quietly(source):
            return HuggingFaceEmbeddings(
                model_name=str(source), encode_kwargs={"normalize_embeddings": True}
            )

    def _read(self) -> tuple[Any, list[tuple[str, str, str]]]:
        """Return the serialised FAISS index and (id, text, source) of each chunk."""
        if not self.file.exists():
            return None, []
        try:
            saved = load_file(self.file)
            head = json.loads(saved["chunks"].tobytes())
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(
                f"'{self.file}' cannot be read ({error}). Delete the file, and ingest again."
            ) from error
        if head["embedder"] != self.settings.embedder:
            raise InputError(
                f"The index '{self.name}' was built with embedder '{head['embedder']}', not"
                f" '{self.settings.embedder}'. Choose another --index, or delete '{self.file}'"
                " and run `ragfuse ingest` again."
            )
        return saved["index"], head["chunks"]

    def _open(self, saved: Any, chunks: Sequence[tuple[str, str, str]]) -> Any:
        """Return LangChain's FAISS store over the result of `_read`."""
        import faiss
        from langchain_community.docstore.in_memory import InMemoryDocstore
        from langchain_community.vectorstores import FAISS
        from langchain_core.documents import Document

        documents = {
            id: Document(text, id=id, metadata={"source": source}) for id, text, source in chunks
        }
        index: Any
        if saved is None:
            index = faiss.IndexFlatL2(len(self.embeddings.embed_query("?")))
        else:
            index = faiss.deserialize_index(saved)
        return FAISS(
            self.embeddings, index, InMemoryDocstore(documents), dict(enumerate(documents))
        )

    def _save(self, store: Any) -> None:
        import faiss

        documents = [
            (id, store.docstore.search(id)) for _, id in sorted(store.index_to_docstore_id.items())
        ]
        chunks = [
            (id, document.page_content, document.metadata["source"]) for id, document in documents
        ]
        head = json.dumps({"embedder": self.settings.embedder, "chunks": chunks}).encode()
        tensors = {
            "index": faiss.serialize_index(store.index),
            "chunks": np.frombuffer(head, np.uint8),
        }
        replace_file(self.file, lambda path: save_file(tensors, path))


def replace_file(target: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically. Only this user can access the new file."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        os.close(open_file(partial, os.O_WRONLY))
        write(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
