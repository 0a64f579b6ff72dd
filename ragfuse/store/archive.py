"""The archive format: chunks, as the files of the disk tier, and known texts in one plain tar file.

    ragfuse-archive.json {"version": 2} · chunks/ab/<digest>.kv ... · texts/all.jsonl · end

`bulk.py` decides which chunks are exported and imported. Names of members are never used as paths, and every layer has
a checksum. Checksums detect damage but not malice: whoever made an archive decides what KV cache the model continues
from, so import archives only from people you trust.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ragfuse.errors import StoreError
from ragfuse.store.chunkfile import Header, pack_header, pieces
from ragfuse.store.disk import chunk_path
from ragfuse.store.tier import EntryMeta
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey

_FIRST_MEMBER, _LAST_MEMBER = "ragfuse-archive.json", "end"


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


class ArchiveProblem(NamedTuple):
    """A part of an archive that cannot be read, and the reason."""

    what: str
    why: str


class ArchivedChunk(NamedTuple):
    """A chunk in an archive: its key, its description, and all of its pieces, uint8 `[nbytes]` each."""

    key: ChunkKey
    meta: EntryMeta
    blobs: tuple[Tensor, ...]


class ArchiveWriter:
    """A writer of an archive's members, one after the other, into an open tar file."""

    def __init__(self, file: tarfile.TarFile) -> None:
        self._file = file
        self._member(_FIRST_MEMBER, json.dumps({"version": FORMAT_VERSION}).encode())

    def chunk(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> int:
        """Write a chunk and return its bytes.

        Args:
            key: Key of the chunk.
            meta: The description of the entry; missing checksums are added.
            blobs: Its pieces, uint8 `[nbytes]` each.
        """
        return self._member(str(chunk_path(Path(), key)), b"".join(pieces(pack_header(key, meta.sealed(blobs)), blobs)))

    def texts(self, texts: Sequence[ArchivedText]) -> int:
        """Write all texts as one member, and return how many there are."""
        lines = "".join(json.dumps(text._asdict()) + "\n" for text in texts)
        if texts:
            self._member("texts/all.jsonl", lines.encode())
        return len(texts)

    def end(self) -> None:
        """Write the last member, without which an archive counts as cut off."""
        self._member(_LAST_MEMBER, b"")

    def _member(self, name: str, data: bytes) -> int:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o600
        self._file.addfile(info, BytesIO(data))
        return len(data)


@contextmanager
def new_archive(path: Path) -> Iterator[ArchiveWriter]:
    """Write an archive, which appears at `path` whole or not at all.

    Yields:
        A writer for use within the `with` block.

    Raises:
        StoreError: The archive cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
                writer = ArchiveWriter(archive)
                yield writer
                writer.end()
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"The archive cannot be written to '{path}': {error.strerror or error}. Name another file, or free space."
        ) from error


ArchiveItem = ArchivedChunk | list[ArchivedText] | ArchiveProblem


def read_archive(path: Path, progress: Callable[[int, int], object] | None = None) -> Iterator[ArchiveItem]:
    """Read the members of an archive, one after the other.

    Args:
        path: The archive.
        progress: Called after each member with the bytes read so far and the bytes in all.

    Yields:
        A chunk, a list of texts, or a part that cannot be read.

    Raises:
        StoreError: The file is not an archive of this version.
    """
    try:
        archive = tarfile.open(path, "r:")  # noqa: SIM115 - closed below
        first = archive.extractfile(archive.next() or "")
        version = json.loads(first.read())["version"] if first is not None else None
    except (OSError, ValueError, KeyError, TypeError, tarfile.TarError) as error:
        raise StoreError(f"Wanted an archive of `ragfuse store export` at '{path}', found none ({error}).") from error
    with archive:
        if version != FORMAT_VERSION:
            raise StoreError(
                f"Wanted an archive of version {FORMAT_VERSION}, found {version}: '{path}'. Export it again."
            )
        size, last = path.stat().st_size, ""
        try:
            while (member := archive.next()) is not None:
                last = member.name
                if last != _LAST_MEMBER:
                    yield _read(archive, member)
                if progress is not None:
                    progress(archive.offset, size)
        except (OSError, tarfile.TarError) as error:
            yield ArchiveProblem(f"what follows {last[:160]!r}", str(error))
        if last != _LAST_MEMBER:
            yield ArchiveProblem("the end", "the archive has been cut off")


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> ArchiveItem:
    file = archive.extractfile(member) if member.isreg() else None
    data = file.read() if file is not None else b""
    try:
        if member.name.startswith("texts/"):
            texts = [ArchivedText(**json.loads(line)) for line in data.splitlines()]
            if any(ChunkKey.parse(text.key).model != text.model for text in texts):
                raise ValueError("one of its texts names one model, and its key another")
            return texts
        header = Header.parse(data)
        if header.nbytes != len(data):
            raise ValueError(f"it should have {header.nbytes} bytes, but has {len(data)}")
        wanted = range(len(header.meta.layers))
        begin, end = header.span(wanted)
        whole = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.uint8)
        return ArchivedChunk(header.key, header.meta, tuple(header.cut(whole, wanted)))
    except (ValueError, TypeError) as error:
        return ArchiveProblem(repr(member.name[:160]), str(error)[:160])
