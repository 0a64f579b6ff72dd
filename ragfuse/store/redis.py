"""A tier on a Redis or Valkey server, shared by all clients of the server.

The server evicts entries, so set `maxmemory` and `maxmemory-policy allkeys-lru` there. The server
also drops entries that were not used for `ttl_s` seconds.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from ragfuse.errors import StoreError
from ragfuse.plan.evict import Evictor
from ragfuse.settings import Settings
from ragfuse.store.blobs import BlobTier
from ragfuse.store.tier import EntryMeta, shown
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey

_PREFIX = f"ragfuse:{FORMAT_VERSION}:"
_UPLOADS = "ragfuse-upload:"
_PIECE_NBYTES = 1 << 20
_UPLOAD_S = 60
_SCAN = 512


class RedisTier(BlobTier):
    """A tier on a Redis or Valkey server. An entry has at most 512 MB, the limit of a Redis value.

    Args:
        url: A redis-py URL: redis://, rediss:// (TLS) or unix://, with user and password.
        timeout_s: Seconds of silence after which the server counts as down.
        ttl_s: Seconds without a use after which the server drops an entry. None means never.
        name: Name of the tier.

    Raises:
        StoreError: The URL cannot be used, or redis-py is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 2.0,
        ttl_s: float | None = None,
        name: str = "redis",
    ) -> None:
        super().__init__(name, shown(url))
        self._client, self.refusals = _connect(url, timeout_s)
        self._ttl_ms = int(ttl_s * 1000) if ttl_s else 0
        self._ask("be opened", self._client.ping, None)

    @classmethod
    def open(cls, url: str, settings: Settings, evict: Evictor, name: str) -> Self:
        """Open the tier with `tier_timeout_s` and `ttl_s` of the settings; `evict` is not used."""
        return cls(url, timeout_s=settings.tier_timeout_s, ttl_s=settings.ttl_s, name=name)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Mark entries as used now. This restarts the time to live of the entries."""

        def use() -> None:
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    self._use(pipeline, str(key))
                pipeline.execute()

        self._ask("record uses", use, None)

    def close(self) -> None:
        """Close the connections."""
        super().close()
        self._client.close()

    def _use(self, pipeline: Any, name: str) -> None:
        if self._ttl_ms:
            pipeline.pexpire(_PREFIX + name, self._ttl_ms)
        else:
            pipeline.touch(_PREFIX + name)

    def _read(self, name: str, begin: int, end: int) -> bytes:
        with self._client.pipeline(transaction=False) as pipeline:
            self._use(pipeline, name)
            pipeline.getrange(_PREFIX + name, begin, end - 1)
            is_there, data = pipeline.execute()
        if not is_there:
            raise FileNotFoundError(name)
        return bytes(data)

    def _heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.getrange(_PREFIX + name, 0, nbytes - 1)
            return [data or None for data in pipeline.execute()]

    def _write(self, key: ChunkKey, meta: EntryMeta, parts: Sequence[bytes | memoryview]) -> bool:
        """Upload in pieces that meet the timeout even on a slow link; then rename the upload."""
        name = _PREFIX + str(key)
        upload = f"{_UPLOADS}{uuid.uuid4().hex}"
        data = memoryview(b"".join(parts))
        for lo in range(0, len(data), _PIECE_NBYTES):
            with self._client.pipeline(transaction=True) as pipeline:
                pipeline.append(upload, data[lo : lo + _PIECE_NBYTES])
                pipeline.expire(upload, _UPLOAD_S)
                pipeline.execute()
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.strlen(upload)
            pipeline.rename(upload, name)
            pipeline.pexpire(name, self._ttl_ms) if self._ttl_ms else pipeline.persist(name)
            sent = pipeline.execute()[0]
        if sent != len(data):  # part of the upload was evicted or expired
            self._remove([str(key)])
            raise ConnectionError("part of an upload was evicted or expired")
        return True

    def _remove(self, names: Sequence[str]) -> int:
        return int(self._client.unlink(*(_PREFIX + name for name in names)))

    def _used(self) -> Mapping[str, float]:
        """Return when each value was last used, or the current time if the idle time is unknown."""
        now, found = time.time(), [*self._client.scan_iter(f"{_PREFIX}*", _SCAN, "string")]
        with self._client.pipeline(transaction=False) as pipeline:
            for name in found:
                pipeline.object("idletime", name)
            idle_s = pipeline.execute(raise_on_error=False)
        return {
            name.decode().removeprefix(_PREFIX): now - (idle if isinstance(idle, int) else 0)
            for name, idle in zip(found, idle_s, strict=True)
        }


def _connect(url: str, timeout_s: float) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a client, and the exception types for commands that the server rejects."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise StoreError(
            "A redis tier needs the package redis. Run: pip install 'ragfuse-kv[redis]'"
        ) from error
    # one retry, as the server may have closed an idle connection
    retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
    try:
        client = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry
        )
    except ValueError:
        raise StoreError(  # drops the cause, whose text may contain parts of the password
            "The URL of a redis tier is not valid. In RAGFUSE_TIERS, write"
            " redis://[user:password@]host[:port][/database], rediss:// or"
            " unix://[user:password@]/path. Replace / : @ in the password by %2F %3A %40."
        ) from None
    return client, (redis.ResponseError,)
