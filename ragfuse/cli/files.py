"""Files on disk that can be ingested, and their texts by LangChain's loaders. Chunks and vectors: see `library`."""

from __future__ import annotations

import codecs
import logging
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

from ragfuse.errors import InputError
from ragfuse.text.file_texts import READERS, texts_in
from ragfuse.types.sizes import capacity_text

TEXT_TYPES, PDF_TYPES = (".txt", ".md", ".rst", ".text", ".markdown"), (".pdf",)
_CODE = (
    "py pyi js mjs ts jsx tsx java kt scala groovy c h cc cpp hpp cs go rs rb php swift m r jl lua pl sh bash",
    "zsh ps1 sql css scss toml yaml yml ini cfg conf properties xml xsd tex bib adoc org log tsv proto graphql cmake",
)
CODE_TYPES = tuple(f".{name}" for names in _CODE for name in names.split(" "))
"""Types that are read as plain text."""
WORD = ".docx"
FILE_TYPES = (*TEXT_TYPES, *PDF_TYPES, *CODE_TYPES, WORD, *READERS)
READABLE_TYPES = "txt, md, rst, html, pdf, docx, ipynb, json, jsonl, csv, source code"
BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
GUESSED = MappingProxyType({"cp1252": "Windows-1252", "latin-1": "Latin-1"})
"""Encodings that a text file is taken for where it is not UTF-8 and has no byte order mark, with their names."""
WORD_NBYTES = 64 << 20
"""Most bytes that are read of one part of a docx, after unpacking."""


LINKED_FOLDER = "a link to a folder: name it by itself to ingest what is in it"
DANGLING = "a link to what is not there"
CANNOT_BE_READ = "cannot be read"
"""How the reason begins for a file or folder of which nothing is known."""


class _TooLargeError(InputError):
    """Tells a document that has more than is read of one, and may be read in parts."""


@dataclass(frozen=True)
class FilesToIngest:
    """Files to ingest, and (file, reason) of those that are skipped; folders that cannot be read are among these."""

    files: tuple[Path, ...]
    skipped: tuple[tuple[Path, str], ...]

    @property
    def unreadable(self) -> tuple[Path, ...]:
        """The files and folders that cannot be read now."""
        return tuple(path for path, why in self.skipped if why.startswith(CANNOT_BE_READ))

    def none_at(self, paths: Sequence[Path]) -> InputError:
        """Return the error that says why there is no document at `paths`."""
        skipped = self.skipped
        why = f"{len(skipped)} skipped ({shown_name(skipped[0][0])}: {skipped[0][1]})" if skipped else "no file"
        return InputError(
            f"Wanted documents ({READABLE_TYPES}) in '{', '.join(map(str, paths))}', found none: {why}. "
            "Name a file or folder that has some."
        )


def find_files(paths: Sequence[Path]) -> FilesToIngest:
    """Find all documents at `paths`, folders included; InputError where there is none."""
    found = look_for_files(paths)
    if not found.files:
        raise found.none_at(paths)
    return found


def look_for_files(paths: Sequence[Path]) -> FilesToIngest:
    """Find all documents at `paths`, folders included, if there are any; InputError for a path that is not there."""
    files: list[Path] = []
    skipped: list[tuple[Path, str]] = []
    for path in paths:
        if _is_dangling(path):
            where = path.readlink()
            raise InputError(
                f"Wanted a file or folder, found a link to '{where}', which is not there, at '{path}'. Repair the link."
            )
        if not path.exists():
            raise InputError(f"Wanted a file or folder, found nothing at '{path}'. Check the spelling.")
        for file, unreadable in sorted(_inside(path)) if path.is_dir() else [(path, "")]:
            reason = unreadable or _skip_reason(file)
            if reason:
                skipped.append((file, reason))
            else:
                files.append(file)
    return FilesToIngest(tuple(dict.fromkeys(files)), tuple(skipped))


def shown_name(path: Path) -> str:
    """Return the name of a file or folder for people: that of a folder ends with a slash.

    A link has its whole path, as what is to be done about it is done there, and so has what has no name, such as ".".
    """
    if path.is_symlink() or not path.name:
        return str(path)
    return f"{path.name}/" if path.is_dir() else path.name


def is_gone(file: Path, mount: str = "") -> bool:
    """Return whether a file was surely deleted or renamed.

    It is not where its folder, or the nearest one above it that exists, cannot be read, nor where its drive is not
    mounted.

    Args:
        file: The file.
        mount: Where its drive was mounted, by `mount_of`. If that is not known (""), an empty folder may be that of a
            drive which is not mounted now.
    """
    try:
        if file.exists():
            return False
        folder = next(folder for folder in file.parents if folder.exists())
        has_something = folder.is_dir() and any(True for _ in folder.iterdir())
        return os.path.ismount(mount) if mount else has_something
    except OSError:
        return False


def mount_of(file: Path) -> str:
    """Return where the drive with a file is mounted."""
    return str(next((folder for folder in file.resolve().parents if os.path.ismount(folder)), ""))


def _inside(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files in a folder that are not hidden, and what cannot be read in it: (path, reason, "" for none)."""
    errors: list[OSError] = []
    for folder, folders, names in os.walk(root, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in folders):
            if path.is_symlink():  # not followed: it may lead back here
                yield path, LINKED_FOLDER
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            try:
                if path.is_file():
                    yield path, ""
                elif _is_dangling(path):
                    yield path, DANGLING
            except OSError as error:
                yield path, _unreadable(error)
    for failed in errors:
        yield Path(failed.filename or root), _unreadable(failed)


def _is_dangling(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _unreadable(error: OSError) -> str:
    return f"{CANNOT_BE_READ} ({error.strerror})"


def _skip_reason(file: Path) -> str:
    """Return why a file cannot be ingested; "" if it can."""
    if not file.is_file():
        return "not a plain file"
    if file.suffix.lower() not in FILE_TYPES:
        return f"not a supported type of document ('{file.suffix}')"
    try:
        with file.open("rb") as handle:
            head = handle.read(8192)
    except OSError as error:
        return _unreadable(error)
    if not head.strip():
        return "empty"
    if file.suffix.lower() not in (*PDF_TYPES, WORD) and b"\0" in head and not _declared_encoding(head):
        return "binary, not text"
    return ""


def _declared_encoding(data: bytes) -> str:
    """Return the encoding that the byte order mark of a file declares; "" without a mark."""
    return next((encoding for mark, encoding in BOMS if data.startswith(mark)), "")


def encoding_of(data: bytes) -> str:
    """Return the encoding of a text file: that of its byte order mark, else UTF-8, else Windows-1252, else Latin-1.

    Raises:
        InputError: The bytes do not match their byte order mark.
    """
    declared = _declared_encoding(data)
    for encoding in (declared,) if declared else ("utf-8", "cp1252"):
        try:
            data.decode(encoding)
        except UnicodeDecodeError as error:
            if declared:
                raise InputError(
                    f"its byte order mark says {declared.upper()}, but it is invalid from byte {error.start} on"
                ) from error
            continue
        return encoding
    return "latin-1"


def guessed_encoding(file: Path) -> str:
    """Return the name of the encoding that a text file is taken for; "" where it is UTF-8 or declares its encoding.

    A PDF or docx, and a file that cannot be read, is no text file.
    """
    if file.suffix.lower() in (*PDF_TYPES, WORD):
        return ""
    try:
        return GUESSED.get(encoding_of(file.read_bytes()), "")
    except (OSError, InputError):
        return ""


def texts_of(file: Path, warns: bool = True) -> Iterable[str]:
    """Return the texts of a document, by LangChain's loaders where they support its type.

    NUL and halves of surrogate pairs become U+FFFD.

    Args:
        file: The document.
        warns: Whether the log tells that; not where the file is read once more.

    Raises:
        InputError: The document cannot be parsed, or contains no text.
    """
    from ragfuse.text.mended import mended_value
    from ragfuse.types.whole_text import whole_text

    suffix = file.suffix.lower()
    try:
        raw_texts = list(_read(file, suffix))
    except ImportError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        remedy = "Split it" if isinstance(error, _TooLargeError) else "Repair it"
        raise InputError(f"'{file}' cannot be read as {suffix[1:]} ({reason}). {remedy} or leave it out.") from error
    if not any(text.strip() for text in raw_texts):
        hint = "if its pages are scanned, run OCR on it first" if suffix in PDF_TYPES else "leave it out"
        raise InputError(f"'{file}' contains no text; {hint}.")
    return mended_value(raw_texts, f"'{file}'") if warns else map(whole_text, raw_texts)


def _read(file: Path, suffix: str) -> Iterator[str]:
    if suffix == WORD:
        yield from _word(file)
    elif suffix in READERS:
        data = file.read_bytes()
        yield from texts_in(data.decode(encoding_of(data)), suffix)
    else:
        yield from (document.page_content for document in _loader(file, suffix).load())


def _word(file: Path) -> Iterator[str]:
    """Yield the text of each part of a docx: the document, then its footnotes and endnotes."""
    with zipfile.ZipFile(file) as packed:
        for name in ("word/document.xml", "word/footnotes.xml", "word/endnotes.xml"):
            if name not in packed.namelist():
                continue
            with packed.open(name) as part:
                data = part.read(WORD_NBYTES + 1)
            if len(data) > WORD_NBYTES:
                raise _TooLargeError(f"its part {name} is over the limit of {capacity_text(WORD_NBYTES)}, unpacked")
            parser = ElementTree.XMLParser(target=_WithoutEntities())
            yield "\n".join(_paragraphs(ElementTree.fromstring(data, parser)))


class _WithoutEntities(ElementTree.TreeBuilder):
    """An XML tree builder that refuses a document type: it could declare entities, and no docx has one."""

    def doctype(self, *named: str | None) -> None:
        raise InputError("one of its XML parts has a DOCTYPE declaration, which no valid docx has")


def _paragraphs(root: ElementTree.Element) -> Iterator[str]:
    """Yield the paragraphs by Word's own tags, in order; fallbacks for older programs are skipped."""
    line: list[str] = []
    stack = [(root, False)]
    while stack:
        node, is_over = stack.pop()
        tag = node.tag.rpartition("}")[2]
        if is_over:
            yield "".join(line)
            line = []
            continue
        if tag == "Fallback":
            continue
        line.append({"t": node.text or "", "tab": "\t", "br": "\n", "cr": "\n"}.get(tag, ""))
        if tag == "p":
            stack.append((node, True))
        stack += [(child, False) for child in reversed(node)]
    if line:
        yield "".join(line)


def _loader(file: Path, suffix: str) -> Any:
    from langchain_community.document_loaders import PyPDFLoader, TextLoader

    if suffix in PDF_TYPES:
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # errors are reported once, by `texts_of`
        return PyPDFLoader(str(file))
    return TextLoader(str(file), encoding=encoding_of(file.read_bytes()))
