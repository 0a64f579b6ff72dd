"""A small sqlite file that threads and processes share: WAL, waiting writers, one reader and one writer connection.

What the tables mean is told by `index.py` and `book.py`.
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

log = logging.getLogger("ragfuse.store")

Row = tuple[Any, ...]
_CLOSE_S = 1.0


class Database:
    """`schema` (CREATE TABLE statements) in the file at `path`. Open it under the folder's lock.

    A file that is damaged or of another `version` is set aside under the name + ".bad", and a new one begun. Text in
    which a bad byte makes no sense comes as bytes: its row is there, and others are read.
    """

    def __init__(self, path: Path, schema: str, version: int, timeout_s: float = 30.0) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._read_lock, self._write_lock = Lock(), Lock()
        self._hurry = local()
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
            connection.execute(f"PRAGMA user_version={version}")

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """All rows; never waits for a writer."""
        with self._read_lock:
            return self._reader.execute(sql, arguments).fetchall()

    @contextmanager
    def write(self, *, wait_s: float | None = None) -> Iterator[sqlite3.Connection]:
        """One transaction, alone among all processes; undone if the block raises.

        sqlite3.OperationalError when another writer is at work, after `wait_s` for threads and again for processes.
        """
        wait_s = self._wait_s if wait_s is None else wait_s
        if not self._write_lock.acquire(timeout=-1 if wait_s is None else wait_s):
            raise sqlite3.OperationalError("another thread is writing")
        try:
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
    def hurried(self, wait_s: float) -> Iterator[None]:
        """Let writes of this thread in the block wait for others no longer than that, unless they say how long."""
        before, self._hurry.wait_s = self._wait_s, wait_s
        try:
            yield
        finally:
            self._hurry.wait_s = before

    @property
    def _wait_s(self) -> float | None:
        wait_s: float | None = getattr(self._hurry, "wait_s", None)
        return wait_s

    def is_sound(self, table: str) -> bool:
        """Whether a table's rows and its indexes agree: opening looks at neither. Others read and write meanwhile."""
        with closing(self._connection()) as connection:
            try:
                return bool(connection.execute(f"PRAGMA integrity_check({table})").fetchone() == ("ok",))
            except sqlite3.OperationalError:  # locked, not damaged
                raise
            except sqlite3.DatabaseError:
                return False

    def rebuild(self, connection: sqlite3.Connection, table: str, without: Iterable[int] = ()) -> None:
        """Make a table and its indexes anew from its rows, but those `without`; of two with one key, the first stays.

        A row that an index does not know of cannot be deleted one by one. Triggers on the table go.
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
        """Let go of the file; where a writer is still at work after a second, it does so at its end."""
        if not self._write_lock.acquire(timeout=_CLOSE_S):
            return
        try:
            with self._read_lock:
                self._reader.close()
                self._writer.close()
        finally:
            self._write_lock.release()

    def _create(self, connection: sqlite3.Connection) -> None:
        for statement in self._schema:
            connection.execute(statement)

    def _connect(self) -> int:
        """Open both connections; the version found, 0 in a new file."""
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))  # sqlite's other files take its mode
        self._reader, self._writer = self._connection(), self._connection()
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.execute("PRAGMA synchronous=NORMAL")
        if self._writer.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("failed its check")
        version: int = self._writer.execute("PRAGMA user_version").fetchone()[0]
        return version

    def _connection(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False)
        connection.text_factory = _text
        return connection

    def _set_aside(self, why: str) -> None:
        self.close()
        log.warning("%s %s: set aside, a new one begun", self._path, why)
        os.replace(self._path, self._path.with_name(self._path.name + ".bad"))
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


def _text(data: bytes) -> str | bytes:
    """Text as it was written; the bytes themselves where they are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
