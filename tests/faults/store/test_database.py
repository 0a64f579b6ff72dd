"""A SQLite file that several stores of one process, and other processes, have open at the same
time.
"""

import subprocess
import sys
from contextlib import closing

from ragfuse.store.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS words(word TEXT)"
COUNT = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM words").fetchone()[0])
connection.close()
"""


def counted_elsewhere(path):
    """What another process finds, which opens the file, reads and closes it, as `ragfuse store ls`
    does.
    """
    found = subprocess.run(
        [sys.executable, "-c", COUNT, str(path)], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


def test_two_stores_of_a_process_and_another_process_see_one_file(tmp_path):
    path = tmp_path / "words.sqlite"
    with closing(Database(tmp_path, path.name, SCHEMA)) as first:
        with first.write() as connection:
            connection.execute("INSERT INTO words VALUES ('one')")
        with closing(Database(tmp_path, path.name, SCHEMA)) as second:
            assert counted_elsewhere(path) == 1
            assert path.with_name("words.sqlite-wal").exists()
            with second.write() as connection:
                connection.execute("INSERT INTO words VALUES ('two')")
            with first.write() as connection:
                connection.execute("INSERT INTO words VALUES ('three')")
            assert (
                first.query("SELECT count(*) FROM words")
                == second.query("SELECT count(*) FROM words")
                == [(3,)]
            )
            assert counted_elsewhere(path) == 3
