"""A small SQLite file that threads and processes share: WAL mode, one connection to read and one to write.

`index.py`, `catalog_file.py` and those who have a `RecordFile` define the tables.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock, local
from typing import Any

from ragfuse.store.access import open_file, share_file
from ragfuse.store.folder import is_full

log = logging.getLogger("ragfuse.store")

Row = tuple[Any, ...]
_CLOSE_S = 1.0


class Database:
    """A SQLite file with a given schema. Open it while holding the folder's lock.

    A file that is damaged or of another version is renamed to name + ".bad", and a new one created. Text that is not
    valid UTF-8 because of a damaged byte is returned as bytes, so that its row and all others can still be read.

    A file on a disk without room is opened all the same, so that rows can be read and deleted: WAL needs files beside
    it, so it is left until the file is opened again with room, and changes are made in place.

    Args:
        path: The file.
        schema: CREATE TABLE statements.
        version: Format version of the file.
        timeout_s: Seconds to wait for another process that is writing.

    Attributes:
        in_place: Whether it was opened without room.
    """

    def __init__(self, path: Path, schema: str, version: int, timeout_s: float = 30.0) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._read_lock, self._write_lock, self._wait_limit = Lock(), Lock(), local()
        self._closed = self.in_place = False
        found: int | str
        try:
            found = self._connect()
        except sqlite3.OperationalError:  # locked, no permission, disk full: the file itself may be whole
            raise
        except sqlite3.DatabaseError as error:
            found = f"is damaged ({error})"
        if found not in (0, version):
            self._set_aside(found if isinstance(found, str) else f"has version {found}, not {version}")
            self._connect()
        self._schema = tuple(filter(str.strip, schema.split(";")))
        with self.write() as connection:
            self._create(connection)
            if found != version:
                connection.execute(f"PRAGMA user_version={version}")

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Return all rows of a query. Never waits for a writer."""
        with self._read_lock:
            if self._reader is None:
                self._reader = self._connection()
            return self._reader.execute(sql, arguments).fetchall()

    @contextmanager
    def write(self, *, wait_s: float | None = None) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction, exclusive among all processes; it is rolled back if the block raises.

        Args:
            wait_s: Seconds to wait for another thread, and again for another process, that is writing. None: the limit
                of `lock_wait_limited`, or else without limit for threads and `timeout_s` for processes.

        Raises:
            sqlite3.OperationalError: Another writer was still at work after that time.
        """
        wait_s = self._wait_s if wait_s is None else wait_s
        if not self._write_lock.acquire(timeout=-1 if wait_s is None else wait_s):
            raise sqlite3.OperationalError("another thread is writing")
        try:
            if self._writer is None:
                self._writer = self._for_writing()
            connection = self._writer
            connection.execute(f"PRAGMA busy_timeout={int(1000 * (self._timeout_s if wait_s is None else wait_s))}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        finally:
            self._write_lock.release()

    @contextmanager
    def lock_wait_limited(self, wait_s: float) -> Iterator[None]:
        """Limit how long this thread's writes in the block wait for others, unless they set `wait_s` themselves."""
        before, self._wait_limit.wait_s = self._wait_s, wait_s
        try:
            yield
        finally:
            self._wait_limit.wait_s = before

    @property
    def _wait_s(self) -> float | None:
        wait_s: float | None = getattr(self._wait_limit, "wait_s", None)
        return wait_s

    def is_sound(self, table: str) -> bool:
        """Return whether a table and its indexes agree, which opening does not check. Others may read and write."""
        with closing(self._connection()) as connection:
            try:
                return bool(connection.execute(f"PRAGMA integrity_check({table})").fetchone() == ("ok",))
            except sqlite3.OperationalError:  # locked, not damaged
                raise
            except sqlite3.DatabaseError:
                return False

    def rebuild(self, connection: sqlite3.Connection, table: str, without: Iterable[int] = ()) -> None:
        """Rebuild a table and its indexes from its rows, except the row ids in `without`.

        Of two rows with one key the first stays. A row that an index lacks cannot be deleted by itself, hence the
        rebuild. Triggers on the table are dropped.
        """
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        connection.execute(f"CREATE TEMP TABLE kept AS SELECT rowid AS row, * FROM {table} NOT INDEXED")
        connection.executemany("DELETE FROM temp.kept WHERE row = ?", ((rowid,) for rowid in without))
        connection.execute(f"DROP TABLE main.{table}")
        self._create(connection)
        connection.execute(
            f"INSERT OR IGNORE INTO main.{table}(rowid, {', '.join(columns)}) SELECT * FROM temp.kept ORDER BY row"
        )
        connection.execute("DROP TABLE temp.kept")

    def close(self) -> None:
        """Close the file. If a writer is still at work after a second, its connection is left to it."""
        self._closed = True
        if not self._write_lock.acquire(timeout=_CLOSE_S):
            return
        try:
            with self._read_lock:
                self._shut()
        finally:
            self._write_lock.release()

    def _shut(self) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None

    def _create(self, connection: sqlite3.Connection) -> None:
        for statement in self._schema:
            connection.execute(statement)

    def _connect(self) -> int:
        """Open both connections and return the version of the file, 0 for a new one."""
        self._make_file()
        try:
            return self._connect_to_write()
        except sqlite3.OperationalError as error:
            if not is_full(self._path.parent, error):
                raise
        self._shut()
        self._leave_wal()
        return self._connect_to_write()

    def _leave_wal(self) -> None:
        """Have the file changed in place from now on, which needs no room. Others must not have it open."""
        with closing(self._connection()) as connection:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")  # so that WAL is read without a file beside it
            connection.execute("PRAGMA journal_mode=MEMORY")
        self.in_place = True

    def _connect_to_write(self) -> int:
        self._reader = self._connection()
        self._writer = writer = self._connection()
        writer.execute(f"PRAGMA journal_mode={'MEMORY' if self.in_place else 'WAL'}")
        if writer.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("failed its check")
        writer.execute("PRAGMA synchronous=NORMAL")
        version: int = writer.execute("PRAGMA user_version").fetchone()[0]
        return version

    def _make_file(self) -> None:
        """Make the file if it is missing, with the mode that SQLite's other files then take.

        A file that is there is not opened: closing it would drop this process's locks on it, also those of another
        `Database`, and the next process would take the file for unused and delete its log of writes.
        """
        try:
            os.close(open_file(self._path, os.O_RDWR | os.O_EXCL))
        except FileExistsError:
            share_file(self._path)

    def _connection(self) -> sqlite3.Connection:
        if self._closed:
            raise sqlite3.ProgrammingError("it is closed")
        connection = sqlite3.connect(self._path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False)
        connection.text_factory = _text
        return connection

    def _for_writing(self) -> sqlite3.Connection:
        connection = self._connection()
        if self.in_place and connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute("PRAGMA journal_mode=MEMORY")
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    def _set_aside(self, why: str) -> None:
        self._shut()
        log.warning("%s %s: it was set aside (renamed to end in .bad), and an empty one was started", self._path, why)
        os.replace(self._path, self._path.with_name(self._path.name + ".bad"))
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


class MemoryDatabase:
    """Tables in this process's memory, used as a `Database` is. What is written is gone once it is closed.

    Args:
        schema: CREATE TABLE statements.
    """

    def __init__(self, schema: str) -> None:
        self._lock = Lock()
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.executescript(schema)

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Return all rows of a query."""
        with self._lock:
            return self._connection.execute(sql, arguments).fetchall()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction; it is rolled back if the block raises."""
        with self._lock:
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def close(self) -> None:
        """Drop the tables."""
        with self._lock:
            self._connection.close()


def _text(data: bytes) -> str | bytes:
    """Decode text; return the bytes themselves if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
