"""Extract the texts from a file's content according to the file type; split texts into chunks.

Bytes, encodings, PDF and docx are handled elsewhere: in `cli.files` for files, in
`serve.upload_text` for uploads.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from ragfuse.errors import InputError
from ragfuse.settings import Settings


def texts_in(text: str, suffix: str) -> Iterator[str]:
    """Yield the texts in the content of a file, one by one.

    Args:
        text: The content of the file.
        suffix: The lowercase suffix of the file's name, such as ".html". A suffix that is not in
            `READERS` means plain text.

    Raises:
        InputError: A line of a JSON Lines file is not JSON.
        ValueError: The content of a JSON file is not JSON.
    """
    reader = READERS.get(suffix)
    return iter((text,)) if reader is None else reader(text)


def _html(text: str) -> Iterator[str]:
    """Yield the visible text of an HTML page, without scripts and styles."""
    from bs4 import BeautifulSoup

    yield re.sub(r"\n\s*\n\s*", "\n\n", BeautifulSoup(text, "html.parser").get_text("\n"))


def _json(text: str) -> Iterator[str]:
    """Yield JSON text, with one value per line and without escapes of non-ASCII characters."""
    yield json.dumps(json.loads(text), ensure_ascii=False, indent=1)


def _lines(text: str) -> Iterator[str]:
    """Yield one text per line of a JSON Lines file. Only LF ends a line."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield from _json(line)
            except ValueError as error:
                raise InputError(f"line {number} is not valid JSON: {error}") from error


def _table(text: str) -> Iterator[str]:
    """Yield a CSV table as one text, with a line "column: value" for each cell."""
    first = text.lstrip().partition("\n")[0]
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t|", key=first.count))
    names = next((row for row in rows if any(row)), [])
    records = (zip_longest(names, row, fillvalue="") for row in rows if any(row))
    rendered = (
        "\n".join(f"{name}: {value}" if name else value for name, value in row) for row in records
    )
    yield "\n\n".join(rendered) or ", ".join(names)


def _notebook(text: str) -> Iterator[str]:
    """Yield the cells of a Jupyter notebook, without their outputs."""
    for cell in json.loads(text).get("cells", ()):
        yield "".join(cell["source"])


READERS: Mapping[str, Callable[[str], Iterator[str]]] = MappingProxyType(
    {
        ".html": _html,
        ".htm": _html,
        ".jsonl": _lines,
        ".ndjson": _lines,
        ".json": _json,
        ".ipynb": _notebook,
        ".csv": _table,
    }
)
"""Functions that yield the texts of a file, by the suffix of the file's name."""


def split_text(text: str, settings: Settings, tokenizer: Any) -> list[str]:
    """Split a text into chunks by LangChain's splitter. Sizes are measured in the LLM's tokens.

    A Markdown heading stays with the text below it, even if the chunk becomes too long by that.
    """
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    # The splitter measures most words more than once.
    size = lru_cache(1 << 16)(lambda text: len(tokenizer.tokenize(text)))
    splitter = RecursiveCharacterTextSplitter(
        [r"\n#{1,6} ", r"\n\n", r"\n", " ", ""],
        is_separator_regex=True,
        chunk_size=settings.chunk_tokens,
        chunk_overlap=settings.chunk_overlap,
        length_function=size,
    )
    chunks = list[str]()
    for chunk in reversed(splitter.split_text(text)):
        is_heading = all(line.startswith("#") for line in chunk.split("\n") if line)
        # longer chunks of such lines are comments of a program
        if chunks and is_heading and size(chunk) <= settings.chunk_tokens // 4:
            chunks[-1] = f"{chunk}\n\n{chunks[-1]}"
        else:
            chunks.append(chunk)
    return chunks[::-1]
