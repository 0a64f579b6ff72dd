"""The command line's search index: documents split and embedded by LangChain, without any KV.

The index's folder holds texts and vectors in parts, each some chunks of one file, named by a digest of the file's
content: nothing is embedded twice, and an interrupted ingest continues where it stopped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ragfuse.cli.files import mount_of, texts_of
from ragfuse.cli.unfinished import UnfinishedIngest, end, unfinished_in
from ragfuse.errors import InputError, SettingsError
from ragfuse.models import quietly, resolve_embedder
from ragfuse.settings import Settings
from ragfuse.store.access import make_root, open_file
from ragfuse.types.keys import digest

log = logging.getLogger("ragfuse.cli")

PART_CHUNKS = 128
"""Chunks that are embedded and written together; an interrupted ingest loses at most these."""

SPLIT_BLOCK_CHARS = 1 << 17
"""Most characters that are split into chunks in one call."""
SPLIT_SHARE = 0.1
"""Share of a file's progress bar for splitting it; the rest is for embedding."""

DOCS_INDEX = "docs-"
"""What the names of indexes of `--docs` begin with."""
_DOCS_INDEX_DIGITS = 12
"""Digits behind that, of a digest of the path."""

Progress = Callable[[float], object]
"""A function that is called with the share of a file that is done, 0 to 1."""


@dataclass(frozen=True)
class Origin:
    """What is known of the file that a document is; "" where an earlier version of ragfuse indexed it.

    Args:
        content: Digest of its bytes.
        mount: Where its drive is mounted.
    """

    content: str = ""
    mount: str = ""

    @classmethod
    def of(cls, file: Path, data: bytes) -> Origin:
        """Return that of a file with these bytes."""
        return cls(digest("content", data), mount_of(file))


UNKNOWN_ORIGIN = Origin()


@dataclass(frozen=True)
class FilePart:
    """Some chunks of one file, in order.

    Args:
        path: The JSON file that stores the part; its vectors are beside it.
        file: Digest of the document's path, its content and the recipe.
        number: Which part of the document this is, from 0.
        of: Number of the document's parts.
        source: Path of the document.
        recipe: Embedder, model, chunk size and overlap that the chunks were made with.
        texts: The chunks.
        origin: The file that the document is.
    """

    path: Path
    file: str
    number: int
    of: int
    source: str
    recipe: tuple[Any, ...]
    texts: tuple[str, ...]
    origin: Origin = UNKNOWN_ORIGIN

    @classmethod
    def read(cls, path: Path) -> FilePart | None:
        """Read the part at `path`; None if there is none. A damaged part is deleted."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            texts, recipe = tuple(map(str, data["texts"])), tuple(data["recipe"])
            number, of = int(data["part"]), int(data["parts"])
            origin = Origin(str(data.get("content", "")), str(data.get("mount", "")))
            return cls(path, str(data["file"]), number, of, data["source"], recipe, texts, origin)
        except FileNotFoundError:  # replaced by another process just now
            return None
        except (ValueError, KeyError, TypeError):
            log.warning(
                "A damaged part of the index was deleted (%s); `ragfuse ingest` on your documents makes it again.",
                path.name,
            )
            delete_part(path)
            return None

    def vectors(self) -> Any:
        """Return the vectors of the texts, float32 [n, dims]; None, and the part is deleted, if they cannot be read."""
        try:
            vectors = load_file(self.path.with_suffix(".safetensors"))["vectors"]
        except (OSError, SafetensorError, KeyError):
            vectors = None
        if vectors is None or vectors.ndim != 2 or len(vectors) != len(self.texts):
            log.warning("The index misses embeddings of '%s'; `ragfuse ingest` on it makes them again.", self.source)
            delete_part(self.path)
            return None
        return vectors


def index_of(docs: Path) -> str:
    """Return the name of the index that `--docs` fills with a file or folder."""
    return f"{DOCS_INDEX}{digest('docs', str(docs.resolve()))[:_DOCS_INDEX_DIGITS]}"


def is_of_docs(index: str) -> bool:
    """Return whether an index has a name that `--docs` gives, not one that a person gave."""
    return re.fullmatch(rf"{DOCS_INDEX}[0-9a-f]{{{_DOCS_INDEX_DIGITS}}}", index) is not None


class Library:
    """One search index: the chunks of documents, with their vectors."""

    def __init__(self, settings: Settings, name: str = "default") -> None:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise SettingsError(f"An index is named by letters, digits, - and _; found '{name}'.")
        if settings.chunk_overlap >= settings.chunk_tokens:
            raise SettingsError(
                f"chunk_overlap is {settings.chunk_overlap}; wanted less than chunk_tokens ({settings.chunk_tokens})."
            )
        self.settings, self.name = settings, name
        self.folder = settings.home / "indexes" / name
        self._embeddings: Any = None
        self._replaced: dict[str, str] = {}  # texts of earlier versions of documents -> the document

    def add(self, file: Path, tokenizer: Any, progress: Progress = lambda done: None) -> list[tuple[str, str]]:
        """Split and embed a file, unless it is indexed already; return (text, source) of its chunks.

        An earlier version of the file is replaced (see `take_replaced`). Of a file that is indexed under another name,
        as it is now, chunks and vectors are taken from there. `tokenizer` is the LLM's, as chunks are measured
        in its tokens. InputError for a file without text.
        """
        source, data = str(file.resolve()), _bytes_of(file)
        name, origin = self._name_of(file, data), Origin.of(file, data)
        parts = {part.number: part for part in self._parts(name) if part.vectors() is not None}
        texts = self._complete_texts(parts)
        twin = {} if texts else self._twin(file, origin.content)
        texts = texts or self._complete_texts(twin) or list(split_file(file, self.settings, tokenizer, progress))
        if not texts:
            raise InputError(f"'{file}' contains no text; leave it out.")
        for part in [part for part in parts.values() if part.origin != origin]:
            self._write_manifest(replace(part, origin=origin))
        count = -(-len(texts) // PART_CHUNKS)
        for number in range(count):
            if number not in parts:
                lo = number * PART_CHUNKS
                part = FilePart(
                    self.folder / f"{name}-{number:05d}.json",
                    file=name,
                    number=number,
                    of=count,
                    source=source,
                    recipe=self._recipe(),
                    texts=tuple(texts[lo : lo + PART_CHUNKS]),
                    origin=origin,
                )
                same = twin.get(number)
                self._write(part, same.vectors() if same is not None and same.texts == part.texts else None)
            progress(SPLIT_SHARE + (1 - SPLIT_SHARE) * (number + 1) / count)
        old = [part for part in self._parts() if part.source == source and part.file != name]
        self._replaced |= {text: source for part in old if part.recipe == self._recipe() for text in part.texts}
        self._drop(iter(old))
        return [(text, source) for text in texts]

    def new_of(self, files: Sequence[Path]) -> list[Path]:
        """Return the files that have to be split and embedded: no complete document of the index is as they are now."""
        counts, lengths, kinds = Counter[str](), dict[str, int](), dict[str, tuple[str, str]]()
        for part in self._parts():
            counts[part.file], lengths[part.file] = counts[part.file] + 1, part.of
            if part.recipe == self._recipe() and part.origin.content:
                kinds[part.file] = part.origin.content, Path(part.source).suffix.lower()
        complete = {file for file, n in counts.items() if n == lengths[file]}
        there, new = {kind for file, kind in kinds.items() if file in complete}, list[Path]()
        for file in files:
            data = _bytes_of(file)
            kind = digest("content", data), file.resolve().suffix.lower()
            if kind not in there and self._name_of(file, data) not in complete:
                new.append(file)
        return new

    def remove(self, sources: Collection[str]) -> dict[str, str]:
        """Remove documents from the index.

        Returns:
            The texts of their chunks, each with a document of any index of this home that holds it, too; "" for none.
        """
        parts = [part for part in self._parts() if part.source in sources]
        self._drop(iter(parts))
        end(self.folder, sources)
        return self._holders(text for part in parts for text in part.texts)

    def take_replaced(self) -> tuple[dict[str, str], set[str]]:
        """Return what became of chunks as their files changed, since this was asked last.

        A file that was only split or embedded anew, as the settings changed, has not changed.

        Returns:
            The texts of the earlier versions' chunks, each with a document of any index of this home that holds it now,
            "" for none; and the documents.
        """
        replaced, self._replaced = self._replaced, {}
        return self._holders(replaced), set(replaced.values())

    @contextmanager
    def ingesting(self, paths: Sequence[Path], files: Sequence[Path]) -> Iterator[None]:
        """Return a context in which `paths` are ingested; where it is left early, `warnings` tells from then on."""
        ingest = UnfinishedIngest.begun(self.folder, paths, files)
        with self._writing():
            make_root(self.folder)
            _atomically(ingest.note, lambda path: path.write_text(ingest.as_json(), encoding="utf-8"))
        yield
        end(self.folder, ingest.sources)

    def warnings(self) -> list[str]:
        """Return a sentence for each ingest into this index that has not ended."""
        unfinished = list(unfinished_in(self.folder))
        documents = dict[str, tuple[int, int]]()
        for part in self._parts() if unfinished else ():
            documents[part.source] = (documents.get(part.source, (0, 0))[0] + 1, part.of)
        return [ingest.in_words(self.name, documents) for ingest in unfinished]

    def require(self) -> None:
        """Raise InputError if nothing was ingested into this index; its texts and the embedder are not loaded."""
        if not any(self.folder.glob("*.json")):
            raise self._empty()

    def sources(self) -> dict[str, int]:
        """Return the number of chunks of each document, in the order of their paths."""
        counts = Counter[str]()
        for part in self._parts():
            counts[part.source] += len(part.texts)
        return dict(sorted(counts.items()))

    def origins(self) -> dict[str, Origin]:
        """Return what is known of the file of each document, in the order of their paths."""
        parts = sorted(self._parts(), key=lambda part: part.source)
        return {part.source: part.origin for part in parts}

    def awaited(self) -> set[str]:
        """Return the documents of ingests that have not ended, whether they are in the index or not."""
        return {source for ingest in unfinished_in(self.folder) for source in ingest.sources}

    def others(self) -> list[str]:
        """Return the names of the other indexes that hold something, those of `--docs` among them."""
        folders = self.folder.parent.glob("[!.]*") if self.folder.parent.is_dir() else ()
        return sorted(each.name for each in folders if each.name != self.name and any(each.glob("*.json")))

    def search(self, question: str) -> list[tuple[str, str]]:
        """Return (text, source) of the chunks that are nearest to a question, `top_k` of the settings at most.

        A text that several documents have is found once, and the next best takes the place of its copies.
        """
        store, most = self.vector_store(), self.settings.top_k
        n, found = most, dict[str, tuple[str, str]]()
        while True:
            for each in store.similarity_search(question, k=n):
                found.setdefault(each.page_content.strip(), (each.page_content, each.metadata["source"]))
            if len(found) >= most or n >= store.index.ntotal:
                return list(found.values())[:most]
            n *= 2

    def _empty(self) -> InputError:
        name = "" if self.name == "default" else f" --index {self.name}"
        others = [name for name in self.others() if not is_of_docs(name)]
        there = f" Others are not: {', '.join(others[:8])} (choose one with --index)." if others else ""
        return InputError(f"The index '{self.name}' is empty.{there} Fill it first: ragfuse ingest PATH{name}")

    def vector_store(self) -> Any:
        """Return LangChain's FAISS store over all chunks; InputError if nothing was ingested."""
        parts = [part for part in self._parts() if part.recipe[:1] == self._recipe()[:1]]
        pairs = [(part, vectors) for part in parts if (vectors := part.vectors()) is not None]
        pairs = [(part, vectors) for part, vectors in pairs if vectors.shape[1] == pairs[0][1].shape[1]]
        if not pairs:
            raise self._empty()

        from langchain_community.vectorstores import FAISS

        texts = [text for part, _ in pairs for text in part.texts]
        sources = [{"source": part.source} for part, _ in pairs for _ in part.texts]
        table = np.concatenate([vectors for _, vectors in pairs])
        return FAISS.from_embeddings(zip(texts, table.tolist(), strict=True), self.embeddings, metadatas=sources)

    @property
    def embeddings(self) -> Any:
        """LangChain's embeddings by the embedder of the settings, loaded at first use."""
        if self._embeddings is None:
            from langchain_huggingface import HuggingFaceEmbeddings

            source = resolve_embedder(self.settings.embedder, self.settings.home)
            with quietly(source):
                self._embeddings = HuggingFaceEmbeddings(
                    model_name=str(source), encode_kwargs={"normalize_embeddings": True}
                )
        return self._embeddings

    def _holders(self, texts: Iterable[str]) -> dict[str, str]:
        """Return texts, each with a document of any index of this home that holds it; "" for none."""
        holders = dict.fromkeys(texts, "")
        for path in self.folder.parent.glob("[!.]*/*.json") if holders else ():
            part = FilePart.read(path)
            if part is not None:
                holders |= {text: part.source for text in part.texts if text in holders}
        return holders

    def _name_of(self, file: Path, data: bytes) -> str:
        return digest("file", str(file.resolve()), data, repr(self._recipe()))

    def _twin(self, file: Path, content: str) -> dict[int, FilePart]:
        """Return all parts, by number, of a document with another name that is read as this file is; {} for none."""
        suffix, found = file.resolve().suffix.lower(), dict[str, dict[int, FilePart]]()
        for part in self._parts():
            is_same = part.origin.content == content and part.recipe == self._recipe()
            if is_same and Path(part.source).suffix.lower() == suffix:
                found.setdefault(part.file, {})[part.number] = part
        return next((parts for parts in found.values() if self._complete_texts(parts)), {})

    def _recipe(self) -> tuple[Any, ...]:
        s = self.settings
        return (s.embedder, s.model, s.chunk_tokens, s.chunk_overlap)

    def _complete_texts(self, parts: dict[int, FilePart]) -> list[str]:
        """Return the texts of a file whose parts are all stored; [] if one is missing."""
        is_complete = bool(parts) and len(parts) == next(iter(parts.values())).of
        return [text for number in sorted(parts) for text in parts[number].texts] if is_complete else []

    def _write(self, part: FilePart, vectors: Any) -> None:
        """Write a part with the vectors of its texts, which are computed where they are None."""
        if vectors is None:
            vectors = np.asarray(self.embeddings.embed_documents(list(part.texts)), dtype=np.float32)
        with self._writing():
            make_root(self.folder)
            _atomically(part.path.with_suffix(".safetensors"), lambda path: save_file({"vectors": vectors}, path))
        self._write_manifest(part)

    def _write_manifest(self, part: FilePart) -> None:
        head = {"file": part.file, "part": part.number, "parts": part.of, "source": part.source, "recipe": part.recipe}
        text = json.dumps({**head, **asdict(part.origin), "texts": part.texts})
        with self._writing():
            _atomically(part.path, lambda path: path.write_text(text, encoding="utf-8"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Return a context in which files of the index are written; SettingsError where that fails."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise SettingsError(
                f"The index cannot be written to '{self.folder}' ({error}). Free some space there and run "
                "the same command again, which goes on from here, or set RAGFUSE_HOME to a folder that can be written "
                "to."
            ) from error

    def _parts(self, file: str = "") -> Iterator[FilePart]:
        for path in sorted(self.folder.glob(f"{file}*.json")):
            part = FilePart.read(path)
            if part is not None:
                yield part

    def _drop(self, parts: Iterator[FilePart]) -> None:
        for part in list(parts):
            delete_part(part.path)


def split_file(file: Path, settings: Settings, tokenizer: Any, progress: Progress = lambda done: None) -> Iterator[str]:
    """Yield the chunks of a file, split as the settings say."""
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter(
        chunk_size=settings.chunk_tokens,
        chunk_overlap=settings.chunk_overlap,
        length_function=_token_counter(tokenizer),
    )
    texts = list(texts_of(file))
    total, done = sum(map(len, texts)), 0
    for block in (block for text in texts for block in _blocks(text)):
        yield from filter(None, (chunk.strip() for chunk in splitter.split_text(block)))
        done += len(block)
        progress(SPLIT_SHARE * done / total)


def _token_counter(tokenizer: Any) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text.

    A splitter calls it for every word, often more than once: so it caches, and bypasses the tokenizer's Python code
    where it can.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation is not None:
        return lambda text: len(tokenizer.tokenize(text))
    return lru_cache(1 << 16)(lambda text: len(backend.encode(text, add_special_tokens=False)))


def _blocks(text: str) -> Iterator[str]:
    """Yield a text in blocks of at most `SPLIT_BLOCK_CHARS` that end with a paragraph, a line or a word if possible."""
    lo = 0
    while len(text) - lo > SPLIT_BLOCK_CHARS:
        ends = (
            text.rfind(mark, lo + SPLIT_BLOCK_CHARS // 2, lo + SPLIT_BLOCK_CHARS) + len(mark)
            for mark in ("\n\n", "\n", " ")
        )
        hi = next((end for end in ends if end > lo + SPLIT_BLOCK_CHARS // 2), lo + SPLIT_BLOCK_CHARS)
        yield text[lo:hi]
        lo = hi
    yield text[lo:]


def delete_part(manifest: Path) -> None:
    """Delete a part: first its manifest, without which it is not found, then its vectors."""
    manifest.unlink(missing_ok=True)
    manifest.with_suffix(".safetensors").unlink(missing_ok=True)


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"'{file}' cannot be read ({error.strerror}). Repair it or leave it out.") from error


def _atomically(target: Path, write: Callable[[Path], object]) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        os.close(open_file(partial, os.O_WRONLY))
        write(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
