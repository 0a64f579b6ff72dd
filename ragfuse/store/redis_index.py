"""The commands that a tier sends to its Redis server. Commands that must be atomic are in the script `redis.lua`.

`redis.py` handles tensors and checksums and decides what to evict. redis-py is imported only when a tier is created.
A row is the text that describes an entry: bytes, whether it is pinned, hits, last use, tokens, layers, bytes by level.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from hashlib import sha1
from importlib.resources import files
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ragfuse.errors import StoreError
from ragfuse.store.redis_pieces import Pace, Rest, next_batch
from ragfuse.store.sizes import parse_sizes
from ragfuse.store.tier import Freed, entry_from_row
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey
from ragfuse.types.kv import Entry

_Item = TypeVar("_Item")
_Page = TypeVar("_Page")
_PREFIX = f"ragfuse:{FORMAT_VERSION}:"
_MANY = 512
_RECOUNT_S = 60.0
_SUMS = frozenset({b"", b"#", b"~"})
_READ_NBYTES = 1 << 18
_ROW = re.compile(
    r"([0-9]{1,15}) ([01]) ([0-9]{1,15}) ([0-9]{1,15}(?:\.[0-9]{0,9})?) ([0-9]{1,10}) ([0-9]{1,10}) (.{1,1000})"
)
_SCRIPT_LOCATION = re.compile(r" script: [0-9a-f]{40}")
_NO_TLS = "its URL asks for TLS (rediss://), which most likely is not spoken there: give redis://, or the TLS port"
_REMEDIES = (
    ("handshake operation timed out", _NO_TLS),
    ("WRONG_VERSION_NUMBER", _NO_TLS),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "add ?ssl_ca_certs=FILE to its URL, with the certificate of whoever signed the server's",
    ),
    ("DB index", "give the URL of a database that is there (redis://host/0)"),
    ("WRONGTYPE", f"something else is stored under names {_PREFIX}*: delete it, or give the URL of another database"),
    ("permission", f"give its user the right to all commands, scripts too, on the keys {_PREFIX}*"),
    ("can't run this command", f"give its user the right to all commands on the keys {_PREFIX}*"),
    ("No permissions", f"give its user the right to all commands on the keys {_PREFIX}*"),
    ("read only replica", "give the URL of the primary"),
    ("maxmemory", "give the server more memory or this tier less capacity"),
)


class RedisIndex:
    """The entries in one database of a Redis server, shared by all processes that open it.

    Keys without the prefix `ragfuse:<version>:` are never touched. A failed command is not retried, except in `fields`.
    Stored times are those of the server's clock.

    Args:
        url: URL of the server, as redis-py takes it.
        timeout_s: Seconds of silence after which a command fails.
        ttl_s: Seconds without a use after which an unpinned entry expires; None: never.
        clock: Returns this machine's time in seconds since the epoch.

    Attributes:
        errors: All exceptions that a call may raise.
        down_errors: Those of them which mean that the server is down.
        guard: Makes the context manager in which every request runs.
        address: The server's address without user and password.
        ahead_s: Seconds that this machine's clock was ahead of the server's at the last comparison.
        now_s: This machine's time at that comparison.

    Raises:
        StoreError: The URL cannot be used, or redis-py is not installed.
    """

    def __init__(self, url: str, timeout_s: float, ttl_s: float | None, clock: Callable[[], float] = time.time) -> None:
        self._client, self.errors, self.down_errors = _connect(url, timeout_s)
        self._retry_once = _retry_once()
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext
        self.address = _address(url, self._client.connection_pool.connection_kwargs)
        self._pace, self._clock, self.ahead_s, self.now_s = Pace(timeout_s), clock, 0.0, 0.0
        self._ttl = repr(float(ttl_s or 0))
        self._script = files("ragfuse.store").joinpath("redis.lua").read_bytes()
        self._sha = sha1(self._script, usedforsecurity=False).hexdigest()

    def run(self, command: str, *arguments: str | bytes | int | float) -> Any:
        """Run a command of `redis.lua` and return its result. The script is sent again if the server has lost it."""
        from redis.exceptions import NoScriptError

        with self.guard():
            try:
                return self._client.evalsha(self._sha, 0, _PREFIX, command, *arguments)
            except NoScriptError:
                return self._client.eval(self._script, 0, _PREFIX, command, *arguments)

    def rows(self, names: Iterable[str] | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, row) of the entries with these keys, or of all entries. Up to 512 keys take one round trip."""
        if names is None:
            self._compare(self.run("expire")[3])
            pages = self._pages(lambda cursor: self._client.hscan(f"{_PREFIX}rows", cursor, count=_MANY))
            yield from ((name, row) for page in pages for name, row in page.items() if name not in _SUMS)
            return
        for batch in _batches(names, _MANY):
            stamp, found = self.run("look", *batch)
            self._compare(stamp)
            yield from ((name.encode(), row) for name, row in zip(batch, found, strict=True) if row is not None)

    def count(self) -> int:
        """Return the number of entries."""
        rows, sums = f"{_PREFIX}rows", sorted(_SUMS)
        with self.guard():
            n = int(self._client.hlen(rows))
        with self.guard():
            return n - sum(each is not None for each in self._client.hmget(rows, sums))

    def oldest(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, row) of unpinned entries, least recently used first, requesting a page only when it is needed.

        If the server's order by last use is incomplete, it is rebuilt first (`recount`).
        """
        first, has_recounted = 0, False
        while True:
            stamp, whole, names, rows = self.run("oldest", first, first + _MANY - 1)
            if not (whole or has_recounted):
                has_recounted = True
                self.recount()
                continue
            self._compare(stamp)
            yield from ((name, row) for name, row in zip(names, rows, strict=True) if row is not None)
            first += _MANY
            if len(names) < _MANY:
                return

    def recount(self) -> None:
        """Recount the bytes and entries, and rebuild their order by last use.

        This runs page by page, so that other clients can use the server meanwhile.
        """
        pages = self._pages(lambda cursor: self._client.zscan(f"{_PREFIX}used", cursor, count=_MANY))
        for batch in _batches((name for page in pages for name, _ in page), _MANY):
            self.run("prune", *batch)
        name, cursor = uuid.uuid4().hex, "0"
        while True:
            cursor, name = (part.decode() for part in self.run("recount", name, cursor, _MANY, _RECOUNT_S))
            if cursor == "0":
                return

    def fields(self, key: str, first: int, count: int, *, hit: bool) -> list[bytes | None]:
        """Return the head and `count` pieces of an entry, in one round trip.

        If the connection breaks, the request is repeated once on a new one.

        Args:
            key: Key of the entry.
            first: The first piece.
            count: Number of pieces.
            hit: Whether to record a hit in the same round trip.

        Returns:
            The head, then the pieces; None in place of each that is missing.
        """
        from redis.exceptions import NoScriptError, ResponseError

        names = ["head", *map(str, range(first, first + count))]
        touch = ("touch", 1, self._ttl, key) if hit else ()

        def request() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipeline:
                if touch:  # before the read, so that an entry that has just expired is not read
                    pipeline.evalsha(self._sha, 0, _PREFIX, *touch)
                pipeline.hmget(f"{_PREFIX}chunk:{key}", names)
                return list(pipeline.execute(raise_on_error=False))

        with self.guard():
            *touched, found = self._retry_once(request, lambda error: None)
        if touched and isinstance(touched[0], NoScriptError):
            self.run(*touch)
        if isinstance(found, ResponseError) and not str(found).startswith("WRONGTYPE"):
            raise found
        return [None] * len(names) if isinstance(found, ResponseError) else list(found)

    def touch(self, names: Iterable[str]) -> None:
        """Set the last use of entries to now without counting a hit, and restart their time to live."""
        for batch in _batches(names, _MANY):
            self.run("touch", 0, self._ttl, *batch)

    def reserve(
        self, upload: str, capacity: int, lease_s: float, doomed: Iterable[tuple[bytes, bytes]]
    ) -> tuple[bool, int]:
        """Reserve room for an upload, evicting entries if it is needed, in one atomic step.

        Args:
            upload: Name of the upload, which begins with its size in bytes.
            capacity: Most bytes that entries and uploads may occupy together.
            lease_s: Seconds for which the room is reserved, unless `upload` extends it.
            doomed: (key, row) of the entries to evict. One whose row has changed since is not evicted.

        Returns:
            (True, number of entries evicted), or (False, bytes to free), in which case nothing is evicted.
        """
        flat = [part for pair in doomed for part in pair]
        done, n = self.run("reserve", upload, capacity, repr(lease_s), *flat)
        return bool(done), n

    def upload(self, upload: str, lease_s: float, head: bytes, layers: Sequence[memoryview]) -> None:
        """Send the bytes of an upload piece by piece. If its room was lost meanwhile, stop; `publish` then fails.

        Each piece extends the lease: `lease_s` seconds after the last one, the server deletes the bytes and frees the
        room, even if this process is gone.
        """
        unsent = deque([Rest("head", memoryview(head)), *(Rest(str(i), layer) for i, layer in enumerate(layers))])
        has_room = True
        while unsent and has_room:
            batch, to_join = next_batch(unsent, self._pace.nbytes)
            self._send(f"{_PREFIX}new:{upload}", lease_s, batch)
            for name, _, pieces in to_join:
                self.run("join", upload, repr(lease_s), name, pieces)
            has_room = not unsent or bool(self.run("renew", upload, repr(lease_s)))

    def publish(self, upload: str, key: str, description: str, n_pieces: int) -> bool:
        """Turn an upload into the entry under `key`, in one atomic step; hits and pin of an earlier entry are kept.

        Args:
            upload: Name of the upload.
            key: Key of the entry.
            description: The rest of the entry's row: tokens, layers, and bytes by codec level.
            n_pieces: Pieces that the entry must have.

        Returns:
            False if the upload's lease had ended or a piece of it is missing. The upload is then deleted.
        """
        return bool(self.run("publish", upload, key, description, n_pieces + 1, self._ttl))

    def pin(self, names: Iterable[str], pinned: bool) -> None:
        """Protect entries from eviction and expiry, or stop protecting them."""
        for batch in _batches(names, _MANY):
            self.run("pin", int(pinned), self._ttl, *batch)

    def delete(self, names: Iterable[str]) -> int:
        """Delete entries and return how many there were."""
        return sum(self.run("delete", *batch) for batch in _batches(names, _MANY))

    def without_bytes(self) -> list[str]:
        """Return the keys of entries that have a row but no bytes."""
        names = (name.decode(errors="replace") for name, _ in self.rows(None))
        return [found.decode() for batch in _batches(names, _MANY) for found in self.run("without_bytes", *batch)]

    def sweep(self) -> Freed:
        """Scan all keys of the database, delete entries without a row and uploads without room, and recount.

        Returns:
            What was freed, including the entries and uploads that have expired.
        """
        expired, orphans, nbytes, _ = self.run("expire")
        for kind in ("chunk", "new"):
            start = f"{_PREFIX}{kind}:"
            pages = self._pages(partial(self._client.scan, match=f"{start}*", count=_MANY))
            names = (name[len(start) :] for page in pages for name in page)
            for batch in _batches(names, _MANY):
                n, more = self.run("sweep", kind, *batch)
                orphans, nbytes = orphans + n, nbytes + more
        self.recount()
        return Freed(expired, orphans, nbytes)

    def _compare(self, stamp: bytes) -> None:
        """Compare this machine's clock with the server's time `stamp`."""
        self.now_s = self._clock()
        self.ahead_s = self.now_s - float(stamp)

    def _send(self, key: str, lease_s: float, batch: Sequence[tuple[str, memoryview]]) -> None:
        """Set these fields in one transaction, and adapt the size of the next pieces to the time that it took."""
        began = time.monotonic()
        try:
            with self.guard(), self._client.pipeline(transaction=True) as pipeline:
                for name, value in batch:
                    pipeline.hset(key, name, value)
                pipeline.pexpire(key, int(1000 * lease_s))
                pipeline.execute()
        except self.down_errors:
            self._pace.failed()
            raise
        self._pace.took(sum(value.nbytes for _, value in batch), time.monotonic() - began)

    def _pages(self, scan: Callable[[int], tuple[int, _Page]]) -> Iterator[_Page]:
        """Yield the pages of a scan, one request each."""
        cursor = 0
        while True:
            with self.guard():
                cursor, page = scan(cursor)
            yield page
            if not cursor:
                return

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._client.connection_pool.disconnect()


def entry_of(name: bytes, row: bytes, tier: str, ahead_s: float, now_s: float) -> Entry:
    """Parse a row.

    Args:
        name: Key of the entry.
        row: The row.
        tier: Name of the tier.
        ahead_s: Seconds that this machine's clock is ahead of the server's.
        now_s: This machine's time. A last use later than this counts as now.

    Raises:
        ValueError: The row does not describe an entry.
    """
    found = _ROW.fullmatch(row.decode())
    if found is None:
        raise ValueError("not a row of an entry")
    nbytes, pinned, hits, used, n_tokens, n_layers, sizes_text = found.groups()
    key, sizes = ChunkKey.parse(name.decode()), parse_sizes(sizes_text, int(nbytes))
    last_used = min(float(used) + ahead_s, now_s)
    return entry_from_row(key, tier, int(n_tokens), int(n_layers), sizes, last_used, int(hits), pinned == "1")


def error_text(error: Exception) -> str:
    """Return an error of the server or the connection as text for the log, with a remedy if one is known."""
    text = _SCRIPT_LOCATION.split(str(error), 1)[0].rstrip(".")
    cause = f"{text} {error.__context__}"  # redis-py's text for an unanswered TLS handshake only says "Timeout"
    return text + next((f"; {do}" for what, do in _REMEDIES if what in cause), "")


def _connect(url: str, timeout_s: float) -> tuple[Any, tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """Return a client, all exceptions that it raises, and those of them which mean that the server is down."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.exceptions import InvalidResponse
        from redis.retry import Retry
    except ImportError as error:
        raise StoreError(
            "A redis tier needs the package redis, which is not installed: pip install 'ragfuse-kv[redis]'."
        ) from error
    retry = Retry(NoBackoff(), 0)
    try:
        _check(url)
        client = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry, socket_read_size=_READ_NBYTES
        )
    except ValueError:
        raise StoreError(  # without the cause, whose text may contain parts of the password
            "The URL of a redis tier is not valid: wanted redis://[user:password@]host[:port][/database], rediss:// "
            f"or unix://[user:password@]/path, found another form ({_scheme(url) or 'no'} scheme); correct it "
            "in the setting `tiers` (environment RAGFUSE_TIERS). In a password, write / : @ as %2F %3A %40."
        ) from None
    down_errors = (redis.ConnectionError, redis.TimeoutError, InvalidResponse, OSError)
    return client, (redis.RedisError, OSError), down_errors


def _retry_once() -> Callable[[Callable[[], Any], Callable[[Exception], None]], Any]:
    """Return a function that makes a call, and repeats it once if the connection broke, but not after a timeout."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Retry(NoBackoff(), 1, (redis.ConnectionError,)).call_with_retry


def _check(url: str) -> None:
    """Raise ValueError for a URL from which redis-py would silently take another server or database than was meant."""
    parts = urlsplit(url)
    path = parts.path.strip("/")
    if parts.scheme == "unix":
        if not path:
            raise ValueError("no path")
    elif not parts.hostname or (path and not path.isdecimal()):
        raise ValueError("no host, or the database is not a number")


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""


def _address(url: str, options: dict[str, Any]) -> str:
    if "path" in options:
        return f"unix://{options['path']}"
    return f"{_scheme(url)}://{options['host']}:{options.get('port', 6379)}/{options.get('db', 0)}"


def _batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
