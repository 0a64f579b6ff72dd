"""Archives: chunks, as the files of the disk tier, and known texts in one plain zip file.

    chunks/ab/<digest>.kv ... · texts.jsonl

Names of members are never used as paths, and every layer has a checksum. Checksums detect damage
but not malice: whoever made an archive decides what KV cache the model continues from, so import
archives only from people you trust.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch

from ragfuse.errors import StoreError
from ragfuse.store.catalog import KnownText
from ragfuse.store.chunkfile import Header, pack_header, pieces
from ragfuse.store.disk import chunk_path
from ragfuse.store.levels import joined, loss_of
from ragfuse.store.store import KVStore
from ragfuse.store.tier import Tier, Whole
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

Progress = Callable[[int, int], object]
"""Called with the bytes done and the bytes in all."""
_TEXTS = "texts.jsonl"


@dataclass
class Outcome:
    """The outcome of an export or import.

    Args:
        done: The bytes of the chunks that were written.
        known: Chunks that needed nothing, as they were there already.
        texts: Known texts that were exported or imported.
        troubles: What was left out, and why.
    """

    done: dict[ChunkKey, int] = field(default_factory=dict)
    known: int = 0
    texts: int = 0
    troubles: list[tuple[str, str]] = field(default_factory=list)

    def fail(self, what: object, why: object) -> None:
        """Record what was left out, and why."""
        self.troubles.append((str(what)[:160], str(why)[:200]))


def export(
    store: KVStore,
    path: Path,
    entries: Iterable[Entry],
    texts: Sequence[KnownText] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Write chunks and known texts to an archive file. Chunks that cannot be read are left out and
    reported.

    Args:
        store: The store.
        path: The file.
        entries: Entries of the store; of several of one chunk, the least lossy one is written.
        texts: The known texts.
        progress: Called with the bytes done and in all.

    Raises:
        StoreError: No chunk can be exported, or the file exists and the new one would lack some.
            Nothing is written.
    """
    outcome, done = Outcome(), 0
    sources = {
        entry.key: entry for entry in sorted(entries, key=lambda entry: -loss_of(entry.sizes))
    }
    total = sum(entry.nbytes for entry in sources.values())
    with _new_archive(path) as archive:
        for key, entry in sources.items():
            whole = read_whole(store.tier(entry.tier), entry)
            if whole is None:
                outcome.fail(key, "it cannot be read")
            else:
                meta, blobs = whole
                data = b"".join(pieces(pack_header(key, meta.sealed(blobs)), blobs))
                archive.writestr(str(chunk_path(Path(), key)), data)
                outcome.done[key] = len(data)
            done += entry.nbytes
            if progress is not None:
                progress(done, total)
        archive.writestr(_TEXTS, "".join(json.dumps(text._asdict()) + "\n" for text in texts))
        outcome.texts = len(texts)
        if not outcome.done or (outcome.troubles and path.exists()):
            why = ", ".join(outcome.troubles[0]) if outcome.troubles else "there are none"
            raise StoreError(
                f"'{path}' was not replaced or written: it would lack {len(outcome.troubles):,} of"
                f" {len(sources):,} entries (the first: {why}). Export again, or name another file."
            )
    return outcome


def import_(
    store: KVStore,
    path: Path,
    tier: str | None = None,
    take_texts: Callable[[Sequence[KnownText]], object] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Import the chunks of an archive. Damaged ones are left out and reported.

    Imported chunks are only found by the same model with the same dtype and salt.

    Args:
        store: The store.
        path: The archive file.
        tier: Name of the tier to import to; None: the first slow one.
        take_texts: Called with the known texts of the archive.
        progress: Called with the bytes done and in all.

    Raises:
        StoreError: The file is no archive, or there is no tier of that name.
    """
    names = [each.name for each in store.tiers if each.slow]
    target, outcome, done = store.tier(tier or names[0]), Outcome(), 0
    try:
        archive = ZipFile(path)
    except (OSError, BadZipFile) as error:
        raise StoreError(
            f"Wanted a whole archive of `ragfuse store export` at '{path}', found none ({error})."
        ) from error
    with archive:
        members = archive.infolist()
        for member in members:
            try:
                data = archive.read(member)
                if member.filename != _TEXTS:
                    _import_chunk(data, target, outcome)
                elif take_texts is not None:
                    texts = [KnownText(**json.loads(line)) for line in data.splitlines()]
                    take_texts(texts)
                    outcome.texts += len(texts)
            except Exception as error:  # zipfile raises many kinds for damaged members
                outcome.fail(repr(member.filename), error)
            done += member.file_size
            if progress is not None:
                progress(done, sum(each.file_size for each in members))
    for key in outcome.done.keys() - target.stat(outcome.done).keys():  # evicted again meanwhile
        del outcome.done[key]
        outcome.fail(key, f"tier {target.name} has too little space for all of them")
    return outcome


def read_whole(tier: Tier, entry: Entry) -> Whole | None:
    """Return description and pieces of an entry at all of its levels; None if it cannot be read
    whole.
    """
    wholes = list[Whole]()
    for level in entry.sizes:
        found = tier.get(entry.key, range(entry.n_layers), level)
        if found is None:
            return None
        meta, *blobs = found
        wholes.append((meta.only(level), tuple(blobs)))
    return joined(wholes)


@contextmanager
def _new_archive(path: Path) -> Iterator[ZipFile]:
    """Write an archive, which appears at `path` whole or not at all; StoreError if it cannot be
    written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file, ZipFile(file, "w") as archive:
                yield archive
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"The archive cannot be written to '{path}': {error.strerror or error}. Name another"
            " file, or free space."
        ) from error


def _import_chunk(data: bytes, target: Tier, outcome: Outcome) -> None:
    """Import a chunk of an archive; ValueError if it is damaged."""
    header = Header.parse(data)
    key, meta = header.key, header.meta
    if header.nbytes != len(data):
        raise ValueError(f"it should have {header.nbytes} bytes, but has {len(data)}")
    wanted = range(len(meta.layers))
    begin, end = header.span(wanted)
    blobs = tuple(
        header.cut(torch.frombuffer(bytearray(data[begin:end]), dtype=torch.uint8), wanted)
    )
    if target.stat([key]):
        outcome.known += 1
        return
    if target.put(key, meta, blobs):
        outcome.done[key] = meta.nbytes
    else:
        outcome.fail(key, f"tier {target.name} has no space for it, or did not accept it")
