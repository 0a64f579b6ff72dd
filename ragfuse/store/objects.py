"""A tier in an object store behind an fsspec URL: s3://, gs://, abfs://, or a shared file://.

Each entry is one object. Only the bucket's lifecycle rules evict entries. Set rules that expire
objects after some days and abort incomplete multipart uploads after one day.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from fsspec.asyn import sync
from fsspec.core import url_to_fs
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from ragfuse.errors import StoreError
from ragfuse.plan.evict import Evictor
from ragfuse.settings import Settings
from ragfuse.store.blobs import BlobTier
from ragfuse.store.folder import make_root, open_file
from ragfuse.store.tier import EntryMeta, shown
from ragfuse.types.keys import ChunkKey

_MAX_PARALLEL = 32
_SUFFIX, _TEMPORARY = ".kv", ".tmp"
_SLOWEST_NBYTES_PER_S = 1e6
_OPENING_S = 5.0  # finding credentials may need a request to the metadata service
_LISTING_S = 600.0
_ABANDONED_S = 3600.0  # age from which a temporary file counts as left by a killed writer
_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "created")


class ObjectTier(BlobTier):
    """A tier in a folder of an object store, shared by all processes that open the same URL.

    The URL's fsspec driver finds credentials and endpoint in environment variables or profiles.

    Args:
        url: The folder as an fsspec URL.
        timeout_s: Timeout of a request in seconds; each megabyte of data adds one second.
        name: Name of the tier.

    Raises:
        StoreError: The URL cannot be used, or the bucket is missing or rejects access.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 2.0,
        name: str = "objects",
    ) -> None:
        super().__init__(name, shown(url))
        self._url, self._timeout_s = shown(url), timeout_s
        try:
            self._fs, self._root, self._is_store = _file_system(url, timeout_s)
            self._is_local = isinstance(getattr(self._fs, "sync_fs", None), LocalFileSystem)
            if self._is_local:
                make_root(Path(self._root))
                for path in Path(self._root).glob(f"*{_TEMPORARY}"):
                    if time.time() - path.stat().st_mtime > _ABANDONED_S:
                        path.unlink(missing_ok=True)
        except (ImportError, ValueError, OSError) as error:
            raise self._refused(error) from error
        self._ask("be opened", self._check, None)

    @classmethod
    def open(cls, url: str, settings: Settings, evict: Evictor, name: str) -> Self:
        """Open the tier with `tier_timeout_s` of the settings; `evict` is not used."""
        return cls(url, timeout_s=settings.tier_timeout_s, name=name)

    # internal

    def _call(self, call: Awaitable[Any], *, nbytes: int = 0, extra_s: float = 0.0) -> Any:
        """Wait for a file system call and return its result. Raise if the call takes too long."""
        timeout_s = self._timeout_s + extra_s + nbytes / _SLOWEST_NBYTES_PER_S

        async def run() -> Any:
            return await call

        return sync(self._fs.loop, run, timeout=timeout_s)

    def _check(self) -> None:
        """Raise StoreError if the bucket is missing or rejects access."""
        try:
            with suppress(FileNotFoundError):
                self._call(self._fs._ls(self._root, detail=False), extra_s=_OPENING_S)
                return
            if self._is_store:
                self._call(self._fs._ls(self._root.split("/")[0], detail=False), extra_s=_OPENING_S)
        except Exception as error:
            known = isinstance(error, FileNotFoundError | PermissionError)
            if known or "Credential" in type(error).__name__:
                raise self._refused(error) from error
            raise

    def _refused(self, why: Exception) -> StoreError:
        return StoreError(
            f"The tier at {self._url} cannot be opened ({why}). Use a URL such as"
            " s3://bucket/folder, gs://bucket/folder or file:///folder, install its driver (pip"
            " install 'ragfuse-kv[objects]'), and permit list, read, write and delete."
        )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{_SUFFIX}"

    def _read(self, name: str, begin: int, end: int) -> bytes:
        found = self._call(
            self._fs._cat_file(self._path(name), start=begin, end=end), nbytes=end - begin
        )
        return bytes(found)[: end - begin]

    def _heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        paths, n = [self._path(name) for name in names], len(names)
        reads = self._fs._cat_ranges(paths, [0] * n, [nbytes] * n, on_error="return")
        found = self._call(reads, nbytes=n * nbytes)
        for each in found:
            if isinstance(each, Exception) and not isinstance(each, FileNotFoundError):
                raise each
        return [None if isinstance(each, Exception) else bytes(each) for each in found]

    def _write(self, key: ChunkKey, meta: EntryMeta, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an object atomically. For a file system, write a temporary file and rename it."""
        path = self._path(str(key))
        data = b"".join(parts)
        if self._is_store:
            self._call(self._fs._pipe_file(path, data), nbytes=len(data))
            return True
        temp = f"{path}.{uuid.uuid4().hex}{_TEMPORARY}"
        self._call(self._fs._makedirs(self._root, exist_ok=True))
        if self._is_local:  # create the file with the access mode that suits the folder
            os.close(open_file(Path(temp), os.O_WRONLY | os.O_EXCL))
        self._call(self._fs._pipe_file(temp, data), nbytes=len(data))
        self._call(self._fs._mv(temp, path))
        return True

    def _remove(self, names: Sequence[str]) -> int:
        n_removed = 0
        for lo in range(0, len(names), _MAX_PARALLEL):
            batch = [self._path(name) for name in names[lo : lo + _MAX_PARALLEL]]
            n_removed += self._call(self._remove_all(batch))
        return n_removed

    async def _remove_all(self, paths: Sequence[str]) -> int:
        return sum(await asyncio.gather(*map(self._remove_one, paths)))

    async def _remove_one(self, path: str) -> bool:
        try:
            await self._fs._info(path)  # deleting a missing object raises no error
            await self._fs._rm_file(path)
        except FileNotFoundError:
            return False
        return True

    def _used(self) -> Mapping[str, float]:
        """Return the time of each object's last write."""
        used = dict[str, float]()
        with suppress(FileNotFoundError):
            for info in self._call(self._fs._ls(self._root, detail=True), extra_s=_LISTING_S):
                name = os.path.basename(info["name"])
                when = next((info[name] for name in _MODIFIED if info.get(name)), time.time())
                if name.endswith(_SUFFIX):
                    used[name.removesuffix(_SUFFIX)] = (
                        when.timestamp() if isinstance(when, datetime) else float(when)
                    )
        return used


def _file_system(url: str, timeout_s: float) -> tuple[Any, str, bool]:
    """Return a URL's file system, the path in that file system, and whether writes are atomic."""
    scheme = get_protocol(url)
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        # `_call` limits the time of each request; these limits admit the longest request
        waits = {"connect_timeout": timeout_s, "read_timeout": _LISTING_S}
        options["config_kwargs"] = {
            **waits,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 32,
        }
    plain, root = url_to_fs(url, **options)
    is_store = bool(plain.async_impl)
    fs = plain if is_store else AsyncFileSystemWrapper(plain, asynchronous=False)
    fs.retries = 1  # one attempt; s3fs would retry in addition to botocore
    return fs, str(root).rstrip("/"), is_store or scheme == "memory"
