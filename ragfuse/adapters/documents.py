"""Find a framework's documents inside nested values; show the progress of encoding chunks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

from rich.console import Console

from ragfuse.telemetry.progress import LineProgress
from ragfuse.text.retrieval_runs import RetrievedText
from ragfuse.types.answer import Ingested

MAX_DOCUMENTS = 256
"""Maximum number of documents taken from one value."""
NESTED_DEPTH = 4
"""Maximum nesting depth of mappings and lists that are searched for documents."""
SOURCES = ("source", "file_name", "file_path", "url", "title")
"""Metadata keys that may contain a document's source; earlier keys are preferred."""


def source_of(metadata: Mapping[str, Any], text: str, *ids: str | None) -> str:
    """Return a document's source: a metadata value, else an id, else a checksum of the text.

    Args:
        metadata: The document's metadata.
        text: The document's text.
        *ids: The document's ids, if any; the first non-empty id is used.
    """
    named = (*(metadata.get(name) for name in SOURCES), *ids)
    checksum = f"document {crc32(text.encode(errors='surrogatepass')):08x}"
    return str(next(filter(None, named), checksum))


@dataclass(frozen=True)
class DocumentReader:
    """Finds the documents of one framework inside nested values and returns their texts.

    Args:
        kind: The framework's document class.
        read: Converts a document to (text in a prompt, source, text without metadata).
        opened: Replaces each value before the search, for example a tool message by its artifact.
    """

    kind: type[Any]
    read: Callable[[Any], RetrievedText]
    opened: Callable[[Any], Any] = lambda value: value

    def __call__(self, *values: Any) -> list[RetrievedText]:
        """Return the texts of the documents in these values, at most `MAX_DOCUMENTS` per value."""
        documents = [
            each for value in values for each in islice(self.documents(value), MAX_DOCUMENTS)
        ]
        return [found for each in documents if (found := self.read(each))[0]]

    def documents(self, value: Any, depth: int = NESTED_DEPTH) -> Iterator[Any]:
        """Yield the documents in a value, nested at most `depth` deep in mappings and lists."""
        value = self.opened(value)
        if isinstance(value, self.kind):
            yield value
        elif depth and isinstance(value, Mapping):
            for each in value.values():
                yield from self.documents(each, depth - 1)
        elif depth and isinstance(value, list | tuple):
            # A list that begins with a plain value, such as an embedding, contains no documents.
            if isinstance(value, list) and isinstance(next(iter(value), 0), str | int | float):
                return
            for each in islice(value, MAX_DOCUMENTS):
                yield from self.documents(each, depth - 1)


Progress = bool | Callable[[Ingested], None] | None
"""True shows a progress bar if stderr is a terminal. A callable is called after every document."""


@contextmanager
def shown(
    progress: Progress, total: int | None, what: str = "Encoding chunks"
) -> Iterator[Callable[[Ingested], None] | None]:
    """Yield the `progress` argument for `Engine.ingest`, and remove the progress bar at exit."""
    if not progress or callable(progress):
        yield progress or None
        return
    with LineProgress(Console(file=sys.stderr, quiet=not sys.stderr.isatty())) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done.chunks)
