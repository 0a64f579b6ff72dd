"""A set of chunks as one file: a plain tar of chunk files as the disk tier keeps them, and of known texts.

    ragfuse-archive.json {"version": 1} · chunks/ab/<digest>.kv ... · texts/<number>.jsonl ... · the end mark of tar

The format only: `bulk.py` decides which chunks, and where they come from or go. Any tar program can list one.
A file that is read is not trusted: no member's name is used as a path, only plain members are looked at, no size is
believed that the medium itself does not have, holes are passed over, and every byte of a chunk is under a checksum.
Checksums find damage and not malice: who made an archive decides what a model will have read, so take archives only
from people you trust.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ragfuse.errors import StoreError
from ragfuse.store.chunkfile import Header, header_nbytes, pack_header, pieces
from ragfuse.store.names import has_name
from ragfuse.store.plainfile import check_there, next_written
from ragfuse.store.tier import EntryMeta
from ragfuse.store.upkeep import chunk_path
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey

_FIRST = "ragfuse-archive.json"
_BLOCK = tarfile.BLOCKSIZE
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_FIRST_LOOK = 64
_MAX_TEXTS_NBYTES = 1 << 26
_LINE = re.compile(rb"[^\n]+")
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TEXT = re.compile(rf"\{{\s*+{_STRING}\s*+:\s*+{_STRING}\s*+(?:,\s*+{_STRING}\s*+:\s*+{_STRING}\s*+){{3}}\}}")
"""A line of texts: an object of four texts. Others are not read, so that none makes millions of lists."""


class ArchivedText(NamedTuple):
    """A known text of `model` (the digest in its key): its key as text, the text itself, and where it came from."""

    model: str
    key: str
    text: str
    source: str


@dataclass(frozen=True)
class ArchiveProblem:
    """What of an archive cannot be read, and why."""

    what: str
    why: str


class ArchivedChunk:
    """A chunk of an archive that is being read: what is said of it, and its layers. Only while the archive is open."""

    def __init__(self, file: BufferedReader, begin: int, nbytes: int) -> None:
        self._file, self._begin, self.nbytes = file, begin, nbytes
        head = self._bytes(0, min(nbytes, _FIRST_LOOK))
        self._header = Header.parse(self._bytes(0, min(nbytes, header_nbytes(head))))
        if self._header.nbytes != nbytes:
            raise ValueError(f"{self._header.nbytes} bytes wanted, {nbytes} found")
        self.key, self.meta = self._header.key, self._header.meta

    def read(self) -> tuple[Tensor, ...]:
        """All layers, uint8 [nbytes] each; ValueError if one is not what was written."""
        begin, end = self._header.span(0, len(self.meta.layers))
        check_there(self._file.fileno(), self._begin + begin, self._begin + end)
        whole = torch.empty(end - begin, dtype=torch.uint8)
        self._file.seek(self._begin + begin)
        if self._file.readinto(whole.numpy().data) != len(whole):
            raise ValueError("the file ends too early")
        return tuple(self._header.cut(whole, 0, len(self.meta.layers), verify=True))

    def _bytes(self, begin: int, end: int) -> bytes:
        self._file.seek(self._begin + begin)
        return self._file.read(end - begin)


class ArchiveWriter:
    """Writes members one after the other into an open file."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file, self._texts = file, 0
        self._member(_FIRST, [json.dumps({"version": FORMAT_VERSION}).encode()])
        file.flush()  # from now on it is known for an archive, whatever becomes of it

    def chunk(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> int:
        """One entry; how many bytes it takes."""
        return self._member(str(chunk_path(Path(), key)), pieces(pack_header(key, meta.sealed(blobs)), blobs))

    def texts(self, texts: Sequence[ArchivedText]) -> None:
        """Some known texts."""
        lines = "".join(json.dumps(text._asdict(), ensure_ascii=False) + "\n" for text in texts)
        self._member(f"texts/{self._texts:06d}.jsonl", [lines.encode(errors="replace")])
        self._texts += 1

    def end(self) -> None:
        """The mark that an archive is whole."""
        self._file.write(bytes(2 * _BLOCK))

    def _member(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        parts = list(parts)
        info = tarfile.TarInfo(name)
        info.size, info.mode = sum(len(part) for part in parts), 0o600
        self._file.write(info.tobuf(tarfile.GNU_FORMAT))
        for part in parts:
            self._file.write(part)
        self._file.write(bytes(-info.size % _BLOCK))
        return info.size


@contextmanager
def new_archive(path: Path) -> Iterator[ArchiveWriter]:
    """An archive that appears at `path` whole or not at all. StoreError if it cannot be written.

    Ones that were begun in the same folder by processes that are gone are removed.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _bury(path.parent)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                with suppress(OSError):  # a medium without locks: then none is ever taken for abandoned
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                writer = ArchiveWriter(file)
                yield writer
                writer.end()
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)  # while the lock is held
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"The archive cannot be written to '{path}': {error.strerror or error}. Name another file, or make room."
        ) from error


def _bury(folder: Path) -> None:
    """Remove archives that were begun here by processes that are gone: nobody holds their lock."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if not _is_partial(path.name) or not path.is_file() or path.is_symlink():
                continue
            with path.open("r+b") as file:
                if file.read(len(_FIRST) + 1) == _FIRST.encode() + b"\0":
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _is_partial(name: str) -> bool:
    """Whether a file is called as those are that become archives: .NAME.PID.tmp."""
    whole, _, pid = name.removesuffix(".tmp").rpartition(".")
    return name.endswith(".tmp") and len(whole) > 1 and whole[0] == "." and pid.isascii() and pid.isdecimal()


ArchiveItem = ArchivedChunk | list[ArchivedText] | ArchiveProblem


def read_archive(path: Path, progress: Callable[[int, int], object] | None = None) -> Iterator[ArchiveItem]:
    """What an archive holds, one after the other: chunks (bytes unread yet), texts, and what cannot be read.

    StoreError if it is no archive at all. `progress` is told the bytes gone through, of how many.
    """
    size = _size(path)
    with path.open("rb") as file:
        members = _members(file, size)
        _check_first(path, file, next(members, None))
        for member in members:
            if isinstance(member, ArchiveProblem):
                yield member
                continue
            yield _read(file, *member)
            if progress is not None:
                progress(member[1] + member[0].size, size)


def _size(path: Path) -> int:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "something that is no file" if path.exists() else "nothing"
        raise StoreError(f"Wanted an archive that `export` has made, found {found} at '{path}'. Name such a file.")
    return path.stat().st_size


_Member = tuple[tarfile.TarInfo, int]
"""A member's header, and where its bytes begin."""


def _members(file: BufferedReader, size: int) -> Iterator[_Member | ArchiveProblem]:
    """Plain members that lie in the file as a whole. Behind a damaged one the next is looked for."""
    at, was_good = 0, True
    while at + _BLOCK <= size:
        file.seek(at)
        block = file.read(_BLOCK)
        begin, at = at + _BLOCK, at + _BLOCK
        if not any(block):
            if was_good:
                return
            at = max(at, next_written(file.fileno(), at, size) // _BLOCK * _BLOCK)
            continue
        info = _header(block)
        if info is None:
            if was_good:
                yield ArchiveProblem(f"byte {begin - _BLOCK:,}", "no member begins here")
            was_good = False
            continue
        was_good, at = True, begin + -(-info.size // _BLOCK) * _BLOCK
        if begin + info.size > size:
            yield ArchiveProblem(_shown(info.name), "the archive ends in the middle of it")
            return
        yield (info, begin) if info.type in _PLAIN else ArchiveProblem(_shown(info.name), "it is no plain file")
    yield ArchiveProblem("the end", "the archive has been cut off: its end mark is missing")


def _header(block: bytes) -> tarfile.TarInfo | None:
    if block[257:262] != b"ustar":
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError:
        return None
    return info if info.size >= 0 else None


def _check_first(path: Path, file: BufferedReader, member: _Member | ArchiveProblem | None) -> None:
    found: object = None
    if isinstance(member, tuple) and member[0].name == _FIRST and member[0].size < _BLOCK:
        found = _json(_bytes(file, *member))
    version = found.get("version") if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        what = "another file" if version is None else f"one of version {version!r:.20}"
        raise StoreError(f"Wanted an archive of version {FORMAT_VERSION}, found {what}: '{path}'. Export it again.")


def _read(file: BufferedReader, info: tarfile.TarInfo, begin: int) -> ArchiveItem:
    try:
        if info.name.startswith("texts/"):
            return _texts(file, info, begin)
        chunk = ArchivedChunk(file, begin, info.size)
        if not has_name(chunk.key):
            raise ValueError("its key is not of digests")
        return chunk
    except (OSError, ValueError, RecursionError) as error:
        return ArchiveProblem(_shown(info.name), _shown(str(error)))


def _texts(file: BufferedReader, info: tarfile.TarInfo, begin: int) -> list[ArchivedText]:
    if info.size > _MAX_TEXTS_NBYTES:
        raise ValueError(f"{_MAX_TEXTS_NBYTES} bytes of texts at most, {info.size} found")
    check_there(file.fileno(), begin, begin + info.size)
    return [_text(line[0].decode()) for line in _LINE.finditer(_bytes(file, info, begin))]


def _text(line: str) -> ArchivedText:
    found = _json(line) if _TEXT.fullmatch(line.strip()) else None
    if not isinstance(found, dict) or set(found) != set(ArchivedText._fields):
        raise ValueError("a line of it is no text")
    text = ArchivedText(**found)
    key = ChunkKey.parse(text.key)
    if not has_name(key) or str(key) != text.key:
        raise ValueError("a line of it is no text")
    if key.model != text.model:
        raise ValueError("a text's key is another model's")
    return text


def _bytes(file: BufferedReader, info: tarfile.TarInfo, begin: int) -> bytes:
    file.seek(begin)
    return file.read(info.size)


def _json(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shown(text: str) -> str:
    """Foreign words, safe to print."""
    return "".join(char if char.isprintable() else "?" for char in text[:160])
