"""Repair of a disk tier: make its files and index rows agree, after a crash or power cut and when asked to tidy.

A killed writer leaves a row in the table `writing`, so every write and every opening can clean up after it. Checking
every file is only needed when rows may be missing: the index is new, or the machine went down since (the index's log is
not flushed with every transaction). Small stores are checked at every opening anyway.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from ragfuse.store.chunkfile import ChunkFile
from ragfuse.store.folder import FolderWriter
from ragfuse.store.index import Index
from ragfuse.store.plainfile import remove
from ragfuse.store.tier import Freed
from ragfuse.types.keys import ChunkKey, digest

log = logging.getLogger("ragfuse.store")

SMALL = 4096
"""Most entries of a store whose files are all checked at every opening, which takes well under a second."""
_TEMP = re.compile(r"chunks/[0-9a-f]{2}/[0-9a-zA-Z.]+\.tmp")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def chunk_path(root: Path, key: ChunkKey | str) -> Path:
    """Return the path of an entry's file."""
    name = digest("file", str(key))
    return root / "chunks" / name[:2] / f"{name}.kv"


class Upkeep:
    """The repair of one folder.

    Args:
        root: The folder.
        index: Its index.
        owner: This process as a writer of the folder.
        under_way: Temporary files of this process's writes under way.
        on_corrupt: Called with each entry that is dropped, and why.
    """

    def __init__(
        self,
        root: Path,
        index: Index,
        owner: FolderWriter,
        under_way: set[str],
        on_corrupt: Callable[[object, str], None],
    ) -> None:
        self._root, self._index, self._owner, self._under_way, self._on_corrupt = (
            root,
            index,
            owner,
            under_way,
            on_corrupt,
        )

    def is_due(self) -> bool:
        """Return whether to check every file: rows may be missing, or the store is small."""
        boot = _boot()
        return len(self._index) <= SMALL or not boot or self._index.note("boot") != boot

    def clean_up_dead_writes(self, transaction: sqlite3.Connection) -> Freed:
        """Clean up the writes of processes that died, and return what was freed."""
        freed = Freed()
        for temp, text, owner, nbytes in self._index.under_way(transaction):
            if not self._is_written(temp, owner):
                if _TEMP.fullmatch(temp):
                    remove(self._root / temp)
                if not self._index.has(transaction, text):  # renamed, then killed before the row was there
                    remove(chunk_path(self._root, text))
                self._index.end(transaction, temp)
                freed = freed.plus(Freed(orphans=1, nbytes=nbytes))
        return freed

    def reconcile(self) -> Freed:
        """Make rows and files agree: add a row for a file without one, remove a row whose file is missing.

        Others may write meanwhile, so every mismatch is checked again inside a transaction. Returns what was freed.
        """
        is_sound = self._index.is_sound()
        with self._index.write() as transaction:
            for _ in range(self._index.mend(transaction, is_sound)):
                self._on_corrupt("an entry", "its row makes no sense")
        rows = {_packed_row(text, nbytes) for text, nbytes in self._index.sizes()}
        freed, reported = Freed(), set[str]()
        for folder in sorted(each for each in (self._root / "chunks").glob("*/") if not each.is_symlink()):
            odd = [path for path in folder.iterdir() if not self._agrees(path, rows)]
            if odd:
                with self._index.write() as transaction:
                    for path in odd:
                        freed = freed.plus(self._settle(transaction, path, reported))
        freed = freed.plus(self._forget_missing(rows, reported)) if rows else freed
        with self._index.write() as transaction:
            self._index.write_note(transaction, "boot", _boot())
        return freed

    def _is_written(self, temp: str, owner: str) -> bool:
        return temp in self._under_way if self._owner.is_me(owner) else self._owner.is_alive(owner)

    def _agrees(self, path: Path, rows: set[bytes]) -> bool:
        if path.suffix != ".kv":
            return path.suffix != ".tmp"
        try:
            row = bytes.fromhex(path.stem) + path.stat().st_size.to_bytes(8, "little")
            rows.remove(row)
            if path.is_symlink() or not path.is_file():
                return False
        except (OSError, ValueError, KeyError):
            return False
        return True

    def _settle(self, transaction: sqlite3.Connection, path: Path, reported: set[str]) -> Freed:
        """Settle one file: remove it if it is damaged or of a dead write, adopt a whole entry, leave folders alone."""
        if path.is_dir():
            return Freed()
        if path.suffix == ".tmp":
            owner = path.name.split(".")[1]
            return Freed() if self._is_written(str(path.relative_to(self._root)), owner) else _unlinked(path)
        try:
            file = ChunkFile(path)
            if chunk_path(self._root, file.key) != path:
                raise ValueError(f"it holds {file.key}")
        except FileNotFoundError:
            return Freed()
        except (OSError, ValueError) as error:
            reported.add(path.stem)
            self._on_corrupt(path.name, str(error))
            return _unlinked(path)
        listed = self._index.entries_in(transaction, [file.key])
        if not listed or listed[0].nbytes != file.nbytes:
            self._index.publish(transaction, file.key, file.meta, file.nbytes, path.stat().st_mtime)
        return Freed()

    def _forget_missing(self, rows: set[bytes], reported: set[str]) -> Freed:
        unmatched = [text for text, nbytes in self._index.sizes() if _packed_row(text, nbytes) in rows]
        freed = Freed()
        for batch in _batches(unmatched):
            with self._index.write() as transaction:
                for text in batch:
                    path = chunk_path(self._root, text)
                    is_removed = not path.is_file() and self._index.remove(transaction, [text])  # or others evicted it
                    if is_removed and path.stem not in reported:  # or its file was counted
                        freed = freed.plus(Freed(orphans=1))
                        self._on_corrupt(text, folder_in_place(path) or "its file is gone")
        return freed


def folder_in_place(path: Path) -> str:
    """Return what to say of a folder where an entry's file belongs, which the store never removes; "" if none is."""
    return f"a folder stands in place of its file, and stays: move '{path}' away" if path.is_dir() else ""


def _packed_row(text: str, nbytes: int) -> bytes:
    """Return a row as 24 bytes, so that a million of them fit into memory."""
    return bytes.fromhex(digest("file", text)) + nbytes.to_bytes(8, "little")


def _batches(texts: list[str]) -> Iterator[list[str]]:
    for lo in range(0, len(texts), 100):
        yield texts[lo : lo + 100]


def _unlinked(path: Path) -> Freed:
    try:
        nbytes = path.lstat().st_size
        path.unlink()
    except OSError:
        return Freed()
    return Freed(orphans=1, nbytes=nbytes)


def _boot() -> str:
    """Return an id that changes whenever the machine starts; "" if the system has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
