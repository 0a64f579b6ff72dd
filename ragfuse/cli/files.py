"""Find documents on disk, and read the texts. For chunks and vectors see `library`."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ragfuse.errors import InputError
from ragfuse.text.file_texts import READERS, texts_in

log = logging.getLogger("ragfuse.cli")

TEXT_TYPES, PDF_TYPE, WORD_TYPE = (".txt", ".md", ".rst", ".text", ".markdown"), ".pdf", ".docx"
_CODE = (
    "py pyi js mjs ts jsx tsx java kt scala groovy c h cc cpp hpp cs go rs rb php swift m r jl"
    " lua pl sh bash zsh ps1 sql css scss toml yaml yml ini cfg conf properties xml xsd tex bib"
    " adoc org log tsv proto graphql cmake"
)
CODE_TYPES = tuple(f".{name}" for name in _CODE.split())
"""Suffixes of source code files, which are read as plain text."""
FILE_TYPES = (*TEXT_TYPES, PDF_TYPE, *CODE_TYPES, WORD_TYPE, *READERS)
READABLE_TYPES = "txt, md, rst, html, pdf, docx, ipynb, json, jsonl, csv, source code"


def find_files(paths: Sequence[Path], known: Collection[str] = ()) -> list[Path]:
    """Return all files at `paths`, including files in folders. Hidden files and links to folders
    are skipped.

    Args:
        paths: Files and folders.
        known: Paths of the documents in an index. Such a document may have been deleted, so a path
            that equals or contains the document's path does not raise InputError.

    Raises:
        InputError: A path does not exist, or there is no document.
    """
    files = dict[Path, None]()
    for path in paths:
        if path.is_dir():
            files |= dict.fromkeys(_inside(path))
        elif path.exists():
            files[path] = None
        elif not any(is_in(source, [path]) for source in known):
            raise InputError(f"There is no file or folder '{path}'. Check the spelling.")
    has_documents = any(file.suffix.lower() in FILE_TYPES for file in files)
    if not has_documents and not any(is_in(source, paths) for source in known):
        named = ", ".join(map(str, paths))
        raise InputError(
            f"There are no documents ({READABLE_TYPES}) among the {len(files):,} files in"
            f" '{named}'. Choose a file or folder with documents."
        )
    return list(files)


def is_in(source: str, paths: Sequence[Path]) -> bool:
    """Return True if a document is one of these files, or is inside one of these folders."""
    return any(Path(source).is_relative_to(path.resolve()) for path in paths)


def _inside(root: Path) -> Iterator[Path]:
    """Yield the visible files in a folder in order; warn about unreadable folders."""

    def fail(error: OSError) -> None:
        log.warning("'%s' cannot be read (%s) and is left out.", error.filename, error.strerror)

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def encoding_of(data: bytes) -> str:
    """Return a text file's encoding: UTF-16 by its BOM, UTF-8, Windows-1252 or Latin-1."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    for encoding in ("utf-8-sig", "cp1252"):
        try:
            data.decode(encoding)
        except UnicodeDecodeError:
            continue
        return encoding
    return "latin-1"


def texts_of(file: Path) -> list[str]:
    """Return the texts of a document. NUL and lone surrogates become U+FFFD.

    Raises:
        InputError: The file is not a document, cannot be parsed, or contains no text.
    """
    from ragfuse.types.texts import whole_value

    suffix = file.suffix.lower()
    if suffix not in FILE_TYPES:
        raise InputError(f"not a supported type of document ('{suffix}')")
    if not file.is_file():
        raise InputError("not a plain file")
    try:
        texts = list(_read(file, suffix))
    except ImportError:
        raise
    except Exception as error:
        raise InputError(f"cannot be read as {suffix[1:]} ({error})") from error
    if not any(text.strip() for text in texts):
        hint = "; if its pages are scanned, run OCR on it first" if suffix == PDF_TYPE else ""
        raise InputError(f"contains no text{hint}")
    return list(whole_value(texts, f"'{file}'"))


def _read(file: Path, suffix: str) -> Iterator[str]:
    if suffix == PDF_TYPE:
        from pypdf import PdfReader

        # without pypdf's own messages: `texts_of` reports each error once
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)
        yield "\n\n".join(page.extract_text() for page in PdfReader(file).pages)
        return
    if suffix == WORD_TYPE:
        with zipfile.ZipFile(file) as packed:
            for name in ("word/document.xml", "word/footnotes.xml", "word/endnotes.xml"):
                if name in packed.namelist():
                    yield _paragraphs(ElementTree.fromstring(packed.read(name)))
        return
    data = file.read_bytes()
    encoding = encoding_of(data)
    if encoding != "utf-16" and b"\0" in data[:8192]:
        raise ValueError("the file is binary")
    if encoding in ("cp1252", "latin-1"):
        log.warning("'%s' is not valid UTF-8 and is read as %s.", file, encoding)
    yield from texts_in(data.decode(encoding).replace("\r\n", "\n"), suffix)


def _paragraphs(root: ElementTree.Element) -> str:
    """Return the text of a Word document's XML, a line per paragraph. Skip `Fallback` elements."""
    for node in list(root.iter()):
        for child in list(node):
            if child.tag.endswith("}Fallback"):
                node.remove(child)
    signs = {"tab": "\t", "br": "\n", "cr": "\n", "p": "\n"}
    tagged = ((node.tag.rpartition("}")[2], node.text or "") for node in root.iter())
    return "".join(text if tag == "t" else signs.get(tag, "") for tag, text in tagged)
