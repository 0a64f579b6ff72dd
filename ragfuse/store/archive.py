"""Export chunks to an archive, and import chunks from an archive.

An archive is a zip file. It contains the texts of the chunks, and the KV in the file format of the
disk tier. Names inside the zip file are never used as paths. Checksums detect damage, but not
tampering. The author of an archive controls the KV that the model continues from, so import
archives only from trusted sources.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import torch

from ragfuse.errors import StoreError
from ragfuse.store.blobs import Header, pieces
from ragfuse.store.catalog import KnownText
from ragfuse.store.disk import chunk_path
from ragfuse.store.levels import joined, loss_of
from ragfuse.store.store import KVStore
from ragfuse.store.tier import Tier, Whole
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

Progress = Callable[[int, int], object]
"""A function that is called as progress(number of finished entries, number of all entries)."""
_TEXTS = "texts.jsonl"


class Copied(NamedTuple):
    """The result of an export or import.

    Args:
        entries: Number of entries written.
        nbytes: Bytes of the entries written.
        texts: Number of texts in the archive.
        known: Number of entries not imported because the tier already had them.
        missing: Number of entries that could not be read: damaged, or evicted during the export.
    """

    entries: int
    nbytes: int
    texts: int
    known: int = 0
    missing: int = 0


def export(
    store: KVStore,
    path: Path,
    entries: Iterable[Entry],
    texts: Sequence[KnownText] = (),
    progress: Progress = lambda done, total: None,
) -> Copied:
    """Write chunks and their texts to an archive file atomically.

    Only the least lossy entry is written if several entries have the same key. Raises StoreError if
    the file cannot be written or no entry can be read. Also raises StoreError if only some entries
    can be read and the file already exists.
    """
    sources = {
        entry.key: entry for entry in sorted(entries, key=lambda entry: -loss_of(entry.sizes))
    }
    written, nbytes = 0, 0
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file, ZipFile(file, "w") as archive:
            for number, (key, entry) in enumerate(sources.items(), 1):
                if (whole := read_whole(store.tier(entry.tier), entry)) is not None:
                    data = b"".join(pieces(key, *whole))
                    archive.writestr(str(chunk_path(Path(), key)), data)
                    written, nbytes = written + 1, nbytes + len(data)
                progress(number, len(sources))
            archive.writestr(_TEXTS, "".join(json.dumps(text._asdict()) + "\n" for text in texts))
        missing = len(sources) - written
        if not written or (missing and path.exists()):
            raise StoreError(
                f"Nothing was exported, and '{path}' is unchanged: {missing:,} of"
                f" {len(sources):,} entries could not be read. Try again, or export to a new file"
                " to save only the readable entries."
            )
        os.replace(partial, path)
    except OSError as error:
        raise StoreError(
            f"'{path}' cannot be written: {error.strerror or error}. Choose another file."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return Copied(written, nbytes, len(texts), missing=missing)


def import_(
    store: KVStore,
    path: Path,
    tier: str | None = None,
    take_texts: Callable[[Sequence[KnownText]], object] = lambda texts: None,
    progress: Progress = lambda done, total: None,
) -> Copied:
    """Import the chunks of an archive into a tier, and pass the archive's texts to `take_texts`.

    The default tier is the first slow tier. Only engines with the model, dtype and salt of the
    exporting engine find these chunks. Raises StoreError if the file is missing or damaged, or if
    the tier is full or unreachable. Entries imported before the error are not deleted.
    """
    target = store.tier(tier or next(each.name for each in store.tiers if each.slow))
    added, texts, known = dict[ChunkKey, int](), list[KnownText](), 0
    try:
        with ZipFile(path) as archive:
            members = archive.infolist()
            for number, member in enumerate(members, 1):
                data = archive.read(member)
                if member.filename == _TEXTS:
                    texts = [KnownText(**json.loads(line)) for line in data.splitlines()]
                elif target.stat([(header := Header.parse(data)).key]):
                    known += 1
                else:
                    wanted = range(len(header.meta.layers))
                    begin, end = header.span(wanted)
                    span = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.uint8)
                    target.put(header.key, header.meta, header.cut(span, wanted))
                    added[header.key] = header.meta.nbytes
                progress(number, len(members))
    except Exception as error:  # zipfile raises many types for damaged members
        raise StoreError(
            f"'{path}' cannot be imported ({error}). Give a complete archive of `ragfuse store"
            f" export`. {len(added):,} entries were imported before the error."
        ) from error
    take_texts(texts)
    if missing := len(added) - len(target.stat(added)):
        raise StoreError(
            f"{missing:,} of {len(added):,} imported entries are not in tier {target.name}: the"
            " tier is too small or unreachable. Give the tier more space, or check the"
            " connection, and import again."
        )
    return Copied(len(added), sum(added.values()), len(texts), known)


def read_whole(tier: Tier, entry: Entry) -> Whole | None:
    """Return an entry's description and all layers at all levels; None if a read fails."""
    wholes = list[Whole]()
    for level in entry.sizes:
        found = tier.get(entry.key, range(entry.n_layers), level)
        if found is None:
            return None
        meta, *blobs = found
        wholes.append((meta.only(level), tuple(blobs)))
    return joined(wholes)
