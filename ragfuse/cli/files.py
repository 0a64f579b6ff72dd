"""Files on disk that can be ingested, and their texts by LangChain's loaders. Chunks and vectors: see `library`."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfuse.errors import InputError

TEXT, HTML, PDF = (".txt", ".md", ".rst", ".text", ".markdown"), (".html", ".htm"), (".pdf",)
BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


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
        why = f"{len(skipped)} passed over ({skipped[0][0].name}: {skipped[0][1]})" if skipped else "no file"
        raise InputError(
            f"Wanted documents (txt, md, rst, html, pdf) in '{', '.join(map(str, paths))}', found none: {why}. "
            "Name a file or folder that holds some."
        )
    return Found(tuple(dict.fromkeys(files)), tuple(skipped))


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _unreadable(file: Path) -> str:
    """Why a file cannot be ingested, "" if it can."""
    if not file.is_file():
        return "not a plain file"
    if file.suffix.lower() not in (*TEXT, *HTML, *PDF):
        return f"not a kind of document that is read here ('{file.suffix}')"
    try:
        with file.open("rb") as handle:
            head = handle.read(8192)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not head.strip():
        return "empty"
    if file.suffix.lower() not in PDF and b"\0" in head and not _marked(head):
        return "binary, not text"
    return ""


def _marked(data: bytes) -> str:
    """The encoding that a file's first bytes declare, "" if they declare none."""
    return next((encoding for mark, encoding in BOMS if data.startswith(mark)), "")


def encoding_of(data: bytes) -> str:
    """How the bytes of a text file are to be read: as marked, else UTF-8, else as old Windows files are."""
    for encoding in filter(None, (_marked(data), "utf-8", "cp1252")):
        try:
            data.decode(encoding)
        except UnicodeDecodeError:
            continue
        return encoding
    return "latin-1"


def texts_of(file: Path) -> Iterable[str]:
    """The texts of a document, by LangChain's loaders; InputError when it cannot be parsed."""
    suffix = file.suffix.lower()
    try:
        texts = [document.page_content for document in _loader(file, suffix).load()]
        return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
    except ImportError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"'{file}' cannot be read as {suffix[1:]} ({why}). Mend it or leave it out.") from error


def _loader(file: Path, suffix: str) -> Any:
    from langchain_community.document_loaders import BSHTMLLoader, PyPDFLoader, TextLoader

    if suffix in PDF:
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what is wrong is told once, by us
        return PyPDFLoader(str(file))
    encoding = encoding_of(file.read_bytes())
    if suffix in HTML:
        parser = {"features": "html.parser"}
        return BSHTMLLoader(str(file), open_encoding=encoding, bs_kwargs=parser, get_text_separator="\n")
    return TextLoader(str(file), encoding=encoding)
