"""A small SQLite file that threads and processes share. In WAL mode, no read waits for a write."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from ragfuse.store.folder import locked, open_file, refusal, share_file
from ragfuse.types.keys import FORMAT_VERSION

log = logging.getLogger("ragfuse.store")

Row = tuple[Any, ...]
T = TypeVar("T")
_CLOSE_S = 1.0


@contextmanager
def store_errors(folder: Path, name: str) -> Iterator[None]:
    """Convert file errors in a store's folder to StoreError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise refusal(folder, f"{name}: {error}") from error


class Database:
    """A SQLite file in a store's folder, or in memory if `folder` is None. Thread-safe.

    Opening the file waits for the folder's lock. A damaged file, or a file of another format
    version, is renamed to `*.bad` and replaced by an empty file. Queries and writes raise
    StoreError if the file cannot be used.
    """

    def __init__(
        self, folder: Path | None, name: str, schema: str, timeout_s: float = 30.0
    ) -> None:
        self._path, self._timeout_s = folder and folder / name, timeout_s
        self._where = folder or Path(":memory:"), name
        self._write_lock, self.is_open = RLock(), True
        self._read_lock = RLock() if folder is not None else self._write_lock
        with (
            store_errors(*self._where),
            locked(folder / "lock") if folder is not None else nullcontext(),
        ):
            self._open(schema)

    def _open(self, schema: str) -> None:
        try:
            found: int | str = self._connect()
        # locked, no permission, disk full: the file itself may be intact
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            found = f"is damaged ({error})"
        if found not in (0, FORMAT_VERSION):
            self._set_aside(
                found if isinstance(found, str) else f"has version {found}, not {FORMAT_VERSION}"
            )
            self._connect()
        with self.write() as connection:
            for statement in filter(str.strip, schema.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Return all rows of a query. Queries wait for writes only if the database is in memory."""
        with store_errors(*self._where), self._read_lock:
            return self._reader.execute(sql, arguments).fetchall()

    def change(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement as a transaction; return the number of changed rows."""
        with self.write() as transaction:
            return transaction.execute(sql, arguments).rowcount

    @contextmanager
    def write(self, wait_s: float | None = None) -> Iterator[sqlite3.Connection]:
        """Run the `with` block as one transaction, and roll back if the block raises.

        Threads and processes write one after another. Raises StoreError if another writer is still
        active after `wait_s` seconds. None means the `timeout_s` of the database.
        """
        wait_s = self._timeout_s if wait_s is None else wait_s
        with store_errors(*self._where):
            if not self._write_lock.acquire(timeout=wait_s):
                raise sqlite3.OperationalError("another thread is writing")
            try:
                self._writer.execute(f"PRAGMA busy_timeout={int(1000 * wait_s)}")
                self._writer.execute("BEGIN IMMEDIATE")
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise
            finally:
                self._write_lock.release()

    def close(self) -> None:
        """Close the file. If a write still runs after one second, the connections stay open."""
        self.is_open = False
        if self._write_lock.acquire(timeout=_CLOSE_S):
            with self._read_lock:
                self._reader.close()
                self._writer.close()
            self._write_lock.release()

    def _connect(self) -> int:
        """Open a connection for writes and one for reads; return the file's version, 0 if new."""
        if self._path is not None:
            self._make_file(self._path)
        self._writer = self._connection()
        self._reader = self._connection() if self._path is not None else self._writer
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.execute("PRAGMA synchronous=NORMAL")
        if self._writer.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("SQLite's quick_check failed")
        return int(self._writer.execute("PRAGMA user_version").fetchone()[0])

    @staticmethod
    def _make_file(path: Path) -> None:
        """Create a missing file, with the mode that SQLite copies to its -wal and -shm files.

        An existing file is not opened here, because closing the file would drop all POSIX locks of
        this process on the file, including the locks of another `Database`. Another process would
        then delete the write-ahead log that is still in use here.
        """
        try:
            os.close(open_file(path, os.O_RDWR | os.O_EXCL))
        except FileExistsError:
            share_file(path)

    def _connection(self) -> sqlite3.Connection:
        where = self._path or ":memory:"
        connection = sqlite3.connect(
            where, timeout=self._timeout_s, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = _text  # a damaged byte makes only one row unusable
        return connection

    def _set_aside(self, why: str) -> None:
        assert self._path is not None
        log.warning(
            "Database %s %s. The file was renamed to end in .bad; an empty one replaces it.",
            self._path,
            why,
        )
        self._writer.close()
        self._reader.close()
        os.replace(self._path, self._path.with_name(self._path.name + ".bad"))
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


def _text(data: bytes) -> str | bytes:
    """Decode text; return the bytes if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
