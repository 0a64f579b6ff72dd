"""Documents on disk into chunks that can be searched: loaders, splitter and vector store are LangChain's.

Texts and vectors of each file lie side by side in the index's folder, named by the file's content: a file is embedded
once, and an interrupted ingest goes on where it stopped. KV is the engine's business.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ragfuse.core import digest
from ragfuse.errors import InputError, SettingsError
from ragfuse.models import resolve_embedder
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from langchain_core.vectorstores import VectorStore

TEXT, HTML, PDF = (".txt", ".md", ".rst", ".text", ".markdown"), (".html", ".htm"), (".pdf",)


@dataclass(frozen=True)
class Found:
    """Files to ingest, and those passed over with the reason."""

    files: tuple[Path, ...]
    skipped: tuple[tuple[Path, str], ...]


def find_files(paths: Sequence[Path]) -> Found:
    """All documents at `paths`, folders searched through; InputError when there is none."""
    files: list[Path] = []
    skipped: list[tuple[Path, str]] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"Wanted a file or folder, found nothing at '{path}'. Check the spelling.")
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path)) if path.is_dir() else [path]
        for file in inside:
            reason = _unreadable(file)
            if reason:
                skipped.append((file, reason))
            else:
                files.append(file)
    if not files:
        why = f"{len(skipped)} files were passed over ({skipped[0][0].name}: {skipped[0][1]})" if skipped else "no file"
        raise InputError(f"Wanted documents (txt, md, html, pdf) in '{', '.join(map(str, paths))}', found none: {why}.")
    return Found(tuple(dict.fromkeys(files)), tuple(skipped))


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _unreadable(file: Path) -> str:
    """Why a file cannot be ingested, "" if it can."""
    if file.suffix.lower() not in (*TEXT, *HTML, *PDF):
        return f"not a kind of document that is read here ('{file.suffix}')"
    try:
        with file.open("rb") as handle:
            head = handle.read(8192)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not head.strip():
        return "empty"
    if file.suffix.lower() not in PDF and b"\0" in head:
        return "binary, not text"
    return ""


class Library:
    """One index: chunk texts with their vectors, by file. `tokenizer` measures chunks in the LLM's tokens."""

    def __init__(self, settings: Settings, name: str = "default") -> None:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise SettingsError(f"An index is named by letters, digits, - and _; found '{name}'.")
        self.settings, self.name = settings, name
        self.folder = settings.home.expanduser() / "indexes" / name
        self._embeddings: Any = None

    def add(self, file: Path, tokenizer: Any) -> list[tuple[str, str]]:
        """(text, source) of a file's chunks, embedded now unless they were; an earlier version of it is replaced."""
        name = digest("file", str(file.resolve()), file.read_bytes(), repr(self._recipe()))
        kept = self.folder / f"{name}.json"
        if kept.exists():
            return [(text, str(file)) for text in json.loads(kept.read_text(encoding="utf-8"))["texts"]]
        texts = [text for text in self._cut(file, tokenizer) if text]
        if texts:
            self._write(name, file, texts)
        return [(text, str(file)) for text in texts]

    def chunks(self) -> list[tuple[str, str]]:
        """(text, source) of every chunk, file by file."""
        return [(text, entry["source"]) for entry, _ in self._entries() for text in entry["texts"]]

    def vectors(self) -> VectorStore:
        """LangChain's FAISS over all chunks; InputError when nothing was ingested."""
        from langchain_community.vectorstores import FAISS

        entries = list(self._entries())
        if not entries:
            raise InputError(
                f"The index '{self.name}' is empty. Fill it first: ragfuse ingest PATH --index {self.name}"
            )
        texts = [text for entry, _ in entries for text in entry["texts"]]
        sources = [{"source": entry["source"]} for entry, _ in entries for _ in entry["texts"]]
        table = np.concatenate([vectors for _, vectors in entries])
        return FAISS.from_embeddings(zip(texts, table.tolist(), strict=True), self.embeddings, metadatas=sources)

    @property
    def embeddings(self) -> Any:
        """LangChain's embeddings of the settings' embedder, loaded now if they were not."""
        if self._embeddings is None:
            from langchain_huggingface import HuggingFaceEmbeddings

            source = str(resolve_embedder(self.settings.embedder, self.settings.home))
            self._embeddings = HuggingFaceEmbeddings(model_name=source, encode_kwargs={"normalize_embeddings": True})
        return self._embeddings

    def _recipe(self) -> tuple[Any, ...]:
        s = self.settings
        return (s.embedder, s.model, s.chunk_tokens, s.chunk_overlap)

    def _cut(self, file: Path, tokenizer: Any) -> Iterator[str]:
        from langchain_text_splitters import RecursiveCharacterTextSplitter

        splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
            tokenizer, chunk_size=self.settings.chunk_tokens, chunk_overlap=self.settings.chunk_overlap
        )
        for text in _texts_of(file):
            yield from (chunk.strip() for chunk in splitter.split_text(text))

    def _write(self, name: str, file: Path, texts: list[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        vectors = np.asarray(self.embeddings.embed_documents(texts), dtype=np.float32)
        source = str(file.resolve())
        old = [path for path, entry in self._manifests() if entry["source"] == source]
        _atomically(self.folder / f"{name}.safetensors", lambda path: save_file({"vectors": vectors}, path))
        text = json.dumps({"source": source, "recipe": self._recipe(), "texts": texts}, ensure_ascii=False)
        _atomically(self.folder / f"{name}.json", lambda path: path.write_text(text, encoding="utf-8"))
        for path in old:
            path.unlink(missing_ok=True)
            path.with_suffix(".safetensors").unlink(missing_ok=True)

    def _manifests(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for path in sorted(self.folder.glob("*.json")):
            yield path, json.loads(path.read_text(encoding="utf-8"))

    def _entries(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for path, entry in self._manifests():
            try:
                vectors = load_file(path.with_suffix(".safetensors"))["vectors"]
            except (OSError, SafetensorError, KeyError):
                path.unlink(missing_ok=True)
                continue
            if tuple(entry["recipe"])[:1] == self._recipe()[:1] and len(vectors) == len(entry["texts"]):
                yield entry, vectors


def _texts_of(file: Path) -> Iterable[str]:
    """The texts of a document, by LangChain's loaders; InputError when it cannot be parsed."""
    from langchain_community.document_loaders import BSHTMLLoader, PyPDFLoader, TextLoader

    suffix = file.suffix.lower()
    try:
        if suffix in PDF:
            loader: Any = PyPDFLoader(str(file))
        elif suffix in HTML:
            loader = BSHTMLLoader(str(file), open_encoding="utf-8", bs_kwargs={"features": "html.parser"})
        else:
            loader = TextLoader(str(file), encoding="utf-8", autodetect_encoding=False)
        return [document.page_content for document in loader.load()]
    except Exception as error:
        raise InputError(f"'{file}' cannot be read as {suffix[1:]} ({type(error).__name__}: {error}).") from error


def _atomically(target: Path, write: Callable[[Path], object]) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        write(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
