"""The archive format: chunks, as the files of the disk tier, and known texts in one plain tar file.

    ragfuse-archive.json {"version": 1} · chunks/ab/<digest>.kv ... · texts/<number>.jsonl ... · the end mark of tar

Any tar program can list an archive. `bulk.py` decides which chunks are exported and imported.

A file that is read is not trusted: members' names are never used as paths, members that are not plain files are
skipped, sizes are checked against the bytes that are on disk, holes are skipped, and every byte of a chunk has a
checksum. Checksums detect damage but not malice: whoever made an archive decides what KV cache the model continues
from, so import archives only from people you trust.
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

_FIRST_MEMBER = "ragfuse-archive.json"
_BLOCK = tarfile.BLOCKSIZE
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_HEAD_NBYTES = 64
_MAX_TEXTS_NBYTES = 1 << 26
_LINE = re.compile(rb"[^\n]+")
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TEXT = re.compile(rf"\{{\s*+{_STRING}\s*+:\s*+{_STRING}\s*+(?:,\s*+{_STRING}\s*+:\s*+{_STRING}\s*+){{3}}\}}")
"""A line of a texts file: a JSON object of four strings.

It is matched before parsing, because other JSON could fill the memory with millions of lists.
"""


class ArchivedText(NamedTuple):
    """The text of a chunk.

    Args:
        model: Digest of the model, as in the key.
        key: Key of the chunk, as a string.
        text: The text.
        source: Where the text came from.
    """

    model: str
    key: str
    text: str
    source: str


@dataclass(frozen=True)
class ArchiveProblem:
    """A part of an archive that cannot be read, and the reason."""

    what: str
    why: str


class ArchivedChunk:
    """A chunk in an open archive: its key and description, and on demand its layers. Unusable once the file is closed.

    Args:
        file: The archive.
        begin: Offset of the chunk in bytes.
        nbytes: Size of the chunk in bytes.

    Raises:
        ValueError: There is no valid header at this offset, or it describes a chunk of another size.
    """

    def __init__(self, file: BufferedReader, begin: int, nbytes: int) -> None:
        self._file, self._begin, self.nbytes = file, begin, nbytes
        head = self._bytes(0, min(nbytes, _HEAD_NBYTES))
        self._header = Header.parse(self._bytes(0, min(nbytes, header_nbytes(head))))
        if self._header.nbytes != nbytes:
            raise ValueError(f"it should have {self._header.nbytes} bytes, but has {nbytes}")
        self.key, self.meta = self._header.key, self._header.meta

    def read(self) -> tuple[Tensor, ...]:
        """Return all layers, encoded, as uint8 `[nbytes]` each.

        Raises:
            ValueError: A layer is damaged or missing.
        """
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
    """A writer of an archive's members, one after the other, into an open file."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file, self._texts = file, 0
        self._member(_FIRST_MEMBER, [json.dumps({"version": FORMAT_VERSION}).encode()])
        file.flush()  # so that `_remove_partials` recognizes the file as an archive if this process is killed

    def chunk(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> int:
        """Write a chunk and return its bytes.

        Args:
            key: Key of the chunk.
            meta: The description of the entry; missing checksums are added.
            blobs: Its pieces, uint8 `[nbytes]` each.
        """
        return self._member(str(chunk_path(Path(), key)), pieces(pack_header(key, meta.sealed(blobs)), blobs))

    def texts(self, texts: Sequence[ArchivedText]) -> None:
        """Write some texts as one member."""
        lines = "".join(json.dumps(text._asdict(), ensure_ascii=False) + "\n" for text in texts)
        self._member(f"texts/{self._texts:06d}.jsonl", [lines.encode(errors="replace")])
        self._texts += 1

    def end(self) -> None:
        """Write the end mark, without which an archive counts as cut off."""
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
    """Write an archive, which appears at `path` whole or not at all.

    Partial archives that killed processes left in the same folder are removed.

    Yields:
        A writer for use within the `with` block.

    Raises:
        StoreError: The archive cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _remove_partials(path.parent)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                with suppress(OSError):  # without file locks, `_remove_partials` removes nothing
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                writer = ArchiveWriter(file)
                yield writer
                writer.end()
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)  # under the lock, or another process could remove it (`_remove_partials`)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"The archive cannot be written to '{path}': {error.strerror or error}. Name another file, or free space."
        ) from error


def _remove_partials(folder: Path) -> None:
    """Remove partial archives whose lock is free, because the process that wrote them is gone."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if not _is_partial(path.name) or not path.is_file() or path.is_symlink():
                continue
            with path.open("r+b") as file:
                if file.read(len(_FIRST_MEMBER) + 1) == _FIRST_MEMBER.encode() + b"\0":
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _is_partial(name: str) -> bool:
    """Return whether a file has the name of a partial archive: .NAME.PID.tmp."""
    whole, _, pid = name.removesuffix(".tmp").rpartition(".")
    return name.endswith(".tmp") and len(whole) > 1 and whole[0] == "." and pid.isascii() and pid.isdecimal()


ArchiveItem = ArchivedChunk | list[ArchivedText] | ArchiveProblem


def read_archive(path: Path, progress: Callable[[int, int], object] | None = None) -> Iterator[ArchiveItem]:
    """Read the members of an archive, one after the other.

    Args:
        path: The archive.
        progress: Called after each member with the bytes read so far and the bytes in all.

    Yields:
        A chunk (its layers are read only on demand), a list of texts, or a part that cannot be read.

    Raises:
        StoreError: The file is not an archive of this version.
    """
    size = _size(path)
    with path.open("rb") as file:
        members = _members(file, size)
        _check_first_member(path, file, next(members, None))
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
        raise StoreError(f"Wanted an archive of `ragfuse store export`, found {found} at '{path}'. Check the path.")
    return path.stat().st_size


_Member = tuple[tarfile.TarInfo, int]
"""A member's header, and the offset of its bytes in the file."""


def _members(file: BufferedReader, size: int) -> Iterator[_Member | ArchiveProblem]:
    """Yield the plain members that are complete. After a damaged header, search block by block for the next one."""
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
                yield ArchiveProblem(f"byte {begin - _BLOCK:,}", "no part of an archive begins here")
            was_good = False
            continue
        was_good, at = True, begin + -(-info.size // _BLOCK) * _BLOCK
        if begin + info.size > size:
            yield ArchiveProblem(_printable(info.name), "the archive ends in the middle of it")
            return
        yield (info, begin) if info.type in _PLAIN else ArchiveProblem(_printable(info.name), "it is not a plain file")
    yield ArchiveProblem("the end", "the archive has been cut off: its end mark is missing")


def _header(block: bytes) -> tarfile.TarInfo | None:
    if block[257:262] != b"ustar":
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError:
        return None
    return info if info.size >= 0 else None


def _check_first_member(path: Path, file: BufferedReader, member: _Member | ArchiveProblem | None) -> None:
    fields: object = None
    if isinstance(member, tuple) and member[0].name == _FIRST_MEMBER and member[0].size < _BLOCK:
        fields = _json(_bytes(file, *member))
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        what = "another kind of file" if version is None else f"one of version {version!r:.20}"
        raise StoreError(f"Wanted an archive of version {FORMAT_VERSION}, found {what}: '{path}'. Export it again.")


def _read(file: BufferedReader, info: tarfile.TarInfo, begin: int) -> ArchiveItem:
    try:
        if info.name.startswith("texts/"):
            return _texts(file, info, begin)
        chunk = ArchivedChunk(file, begin, info.size)
        if not has_name(chunk.key):
            raise ValueError("its key is malformed")
        return chunk
    except (OSError, ValueError, RecursionError) as error:
        return ArchiveProblem(_printable(info.name), _printable(str(error)))


def _texts(file: BufferedReader, info: tarfile.TarInfo, begin: int) -> list[ArchivedText]:
    if info.size > _MAX_TEXTS_NBYTES:
        raise ValueError(f"its texts have {info.size} bytes, more than the limit of {_MAX_TEXTS_NBYTES}")
    check_there(file.fileno(), begin, begin + info.size)
    return [_text(line[0].decode()) for line in _LINE.finditer(_bytes(file, info, begin))]


def _text(line: str) -> ArchivedText:
    fields = _json(line) if _TEXT.fullmatch(line.strip()) else None
    if not isinstance(fields, dict) or set(fields) != set(ArchivedText._fields):
        raise ValueError("one of its lines is not a text record")
    text = ArchivedText(**fields)
    key = ChunkKey.parse(text.key)
    if not has_name(key) or str(key) != text.key:
        raise ValueError("one of its lines is not a text record")
    if key.model != text.model:
        raise ValueError("one of its texts names one model, and its key another")
    return text


def _bytes(file: BufferedReader, info: tarfile.TarInfo, begin: int) -> bytes:
    file.seek(begin)
    return file.read(info.size)


def _json(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _printable(text: str) -> str:
    """Return untrusted text in a form that is safe to print, 160 characters at most."""
    return "".join(char if char.isprintable() else "?" for char in text[:160])
