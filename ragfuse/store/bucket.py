"""Requests to a folder behind an fsspec URL: list it, read ranges of objects, write whole objects, delete them.

Every call ends within a time limit and, except for `Bucket.read`, is tried once. It raises FileNotFoundError if the
object does not exist, ConnectionError or TimeoutError if the store does not answer, and PermissionError or another
OSError if the store refuses. The objects' names and contents are defined in `names.py` and `chunkfile.py`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from fsspec.asyn import sync
from fsspec.core import url_to_fs
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import get_filesystem_class
from fsspec.utils import get_protocol

from ragfuse.errors import StoreError
from ragfuse.settings import SharedWith
from ragfuse.store.access import make_folder, make_root, open_file
from ragfuse.store.plainfile import check_there, open_plain
from ragfuse.store.s3 import S3, SCHEMES
from ragfuse.store.urls import without_user

NO_ANSWER: tuple[type[Exception], ...] = (ConnectionError, TimeoutError)
TEMPORARY = ".tmp"

_Found = TypeVar("_Found")
_MAX_PARALLEL = 32
_SLOWEST_NBYTES_PER_S = 1e6
_OPENING_S = 5.0  # finding credentials may take a request to the machine's metadata service
_LISTING_S = 600.0
_MAX_CALL_S = 3600.0
_MAX_OBJECT_NBYTES = 1 << 44
_PIECE_NBYTES = 1 << 24
_MAX_EMPTY_PAGES = 1000
"""Most consecutive pages of a listing without an object; a listing with more is taken for endless."""
_MAX_PAGES = 1 << 13
"""Most pages of a listing of an object store: enough for eight million objects."""
_UNREACHABLE = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT}
    | {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
    | {errno.EBUSY, errno.EREMOTEIO, errno.EIO}  # drivers raise these for "slow down" and for a failure of the store
)
_CREDENTIALS = re.compile("Credential|Profile|Token")
_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "created")


class Object(NamedTuple):
    """One object of a listing: its size in bytes, and when it was written, in seconds since the epoch."""

    nbytes: int
    modified: float


class Bucket:
    """A folder behind an fsspec URL. Call `check` to find out whether the store answers.

    An object appears whole or not at all: object stores publish a put in one step; on other file systems it is written
    under a temporary name and renamed.

    Args:
        url: The folder.
        timeout_s: Seconds without progress after which a call fails, plus one second for each megabyte it transfers:
            a write over a slow link shows no progress until this machine's buffers have drained.
        shared_with: Who else may use the folder of a file:// URL: "nobody" or "group".

    Attributes:
        url: The URL without user and password, for messages.
        guard: Returns a context manager; every call runs in one. It can refuse calls or translate their errors.

    Raises:
        StoreError: The URL cannot be used.
    """

    def __init__(self, url: str, timeout_s: float, shared_with: SharedWith = "nobody") -> None:
        self.url = without_user(url)
        self._s3: S3 | None = None
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext
        self._full_url, self._timeout_s = url, timeout_s
        self._token, self._serial, self._is_open = uuid4().hex, count(), False
        with suppress(*NO_ANSWER):  # some drivers connect when they are created; `check` will raise the error
            self._open()
            if self._is_local:
                self._make_folder(shared_with)

    def check(self, folder: str) -> dict[str, Object]:
        """Connect to the store and return the objects in `folder` by name.

        Raises:
            StoreError: The folder can never be used: there is no such bucket, no access, or a file in its place.
            ConnectionError: The store cannot be reached.
            TimeoutError: The store does not answer.
        """
        found: dict[str, Object] = {}
        try:
            if self._s3 is not None:
                self._run(self._s3.prepare, extra_s=_OPENING_S)
            for page in self.listing(folder, _OPENING_S):
                found |= page
        except FileNotFoundError as error:
            raise self._store_error("an existing bucket", "none", "Create it, or give the URL of another.") from error
        except OSError as error:
            raise self._opening_error(error) from error
        try:
            info = self._run(lambda: self._fs._info(self._root), extra_s=_OPENING_S)
        except FileNotFoundError:
            return found  # in an object store, an empty folder does not exist
        except OSError as error:
            raise self._opening_error(error) from error
        if info["type"] == "file":
            raise self._store_error("a folder", "a file", "Give the URL of another folder.")
        return found

    def listing(self, folder: str, within_s: float = _LISTING_S) -> Iterator[dict[str, Object]]:
        """Yield all objects below `folder` by name, page by page: a thousand objects, or those of one subfolder.

        Args:
            folder: Name of the folder within this one.
            within_s: Seconds that each page may take in addition to `timeout_s`.

        Raises:
            OSError: The listing does not end.
        """
        pending, firsts, n_empty, n_pages = [(folder, "")], set[tuple[str, str]](), 0, 0
        while pending:
            request = pending.pop()
            n_pages += bool(request[1])
            objects, more = self._run(partial(self._page, *request), extra_s=within_s)
            first = next(iter(objects), "")
            n_empty = 0 if objects else n_empty + bool(request[1])
            is_repeated = (first and (request[0], first) in firsts) or request in more
            if is_repeated or n_empty > _MAX_EMPTY_PAGES or n_pages > _MAX_PAGES:
                raise OSError(errno.EPROTO, f"the server's listing of {folder} never ends")
            firsts.add((request[0], first))
            pending += more
            yield objects

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` (exclusive) of an object, fewer if it ends before.

        This takes one request, and a second one only if the connection breaks.
        """
        try:
            return self._run(lambda: self._read(self._path(name), begin, end), nbytes=end - begin, tries=2)
        except OSError as error:
            return _empty_past_end(error)

    def heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        """Return the first `nbytes` bytes of each object, in parallel requests; None for one that cannot be read."""
        return self._run(
            lambda: self._heads(names, nbytes),
            nbytes=nbytes * len(names),
            extra_s=len(names) // _MAX_PARALLEL * self._timeout_s,
        )

    def write(self, name: str, data: bytes) -> None:
        """Write an object, which appears whole or not at all and replaces an earlier one of that name."""
        self._run(lambda: self._publish(self._path(name), data), nbytes=len(data))

    def mark(self, names: Sequence[str]) -> None:
        """Write empty objects with these names, in parallel, so that their age is zero."""
        self._run(lambda: self._mark(names), extra_s=len(names) // _MAX_PARALLEL * self._timeout_s)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; names without an object are ignored."""
        if names:
            self._run(lambda: self._remove(names), extra_s=len(names) // _MAX_PARALLEL * self._timeout_s)

    def abort(self, folder: str, is_useless: Callable[[str, float], bool]) -> list[int]:
        """Abort interrupted multipart uploads. Only S3 has them; it stores and bills their parts until they end.

        Args:
            folder: Name of the folder that the uploads go to.
            is_useless: Decides from an upload's object name and age in seconds whether to abort it.

        Returns:
            The bytes that each aborted upload had stored.
        """
        freed, n_empty, n_pages = list[int](), 0, 0
        after: dict[str, str] | None = {}
        while self._s3 is not None and after is not None:
            uploads, more = self._run(partial(self._s3.uploads, self._path(folder), after))
            n_empty, n_pages = 0 if uploads else n_empty + 1, n_pages + 1
            if (more and more == after) or n_empty > _MAX_EMPTY_PAGES or n_pages > _MAX_PAGES:
                raise OSError(errno.EPROTO, f"the server's listing of uploads to {folder} never ends")
            useless = [each for each in uploads if is_useless(self._name({"name": each.path}), each.age_s)]
            freed += [self._run(partial(self._s3.abort, each), extra_s=self._timeout_s) for each in useless]
            after = more or None
        return freed

    # inside

    def _open(self) -> None:
        """Create the file system."""
        scheme = get_protocol(self._full_url)
        try:
            if "://" not in self._full_url:
                raise ValueError("no scheme")
            get_filesystem_class(scheme)
        except ValueError as error:
            wanted = "a URL like s3://bucket/folder, gs://bucket/folder or file:///folder"
            raise self._store_error(wanted, "a URL of an unknown kind", "Give another URL.") from error
        except ImportError as error:
            raise self._driver_error(scheme, error) from error
        try:
            plain, root = url_to_fs(self._full_url, **self._options(scheme))
        except Exception as error:
            raise self._opening_error(_as_os_error(error)) from error
        is_store = bool(plain.async_impl)
        self._root, self._is_local = str(root).rstrip("/"), isinstance(plain, LocalFileSystem)
        self._puts_whole = is_store or scheme == "memory"
        self._fs = plain if is_store else AsyncFileSystemWrapper(plain, asynchronous=False)
        self._fs.retries = 1  # s3fs retries by itself, in addition to botocore
        self._s3 = S3(self._fs, self._timeout_s) if scheme in SCHEMES else None
        self._is_open = True

    def _options(self, scheme: str) -> dict[str, Any]:
        """Return the options for the driver of this scheme; it finds endpoints and credentials by itself."""
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if scheme in SCHEMES:
            waits = {"connect_timeout": self._timeout_s, "read_timeout": _MAX_CALL_S}  # each call has its own timeout
            tries = {"retries": {"total_max_attempts": 1}, "max_pool_connections": _MAX_PARALLEL}
            options["config_kwargs"] = {**waits, **tries}
        return options

    def _make_folder(self, shared_with: SharedWith) -> None:
        try:
            make_root(Path(self._root), shared_with)
        except (FileExistsError, NotADirectoryError) as error:
            raise self._store_error(
                "a folder", f"a file ({error.filename})", "Give the URL of another folder."
            ) from error
        except OSError as error:
            raise self._store_error("a folder", f"{error.strerror}", "Give the URL of another folder.") from error
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise self._store_error("a folder", "one that this user may not read and write", "Give another.")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _run(
        self, call: Callable[[], Awaitable[_Found]], *, nbytes: int = 0, extra_s: float = 0.0, tries: int = 1
    ) -> _Found:
        """Run a call within its time limit and return its result.

        A call is repeated, up to `tries` in all, if the connection breaks.
        """
        timeout_s = self._timeout_s + extra_s + nbytes / _SLOWEST_NBYTES_PER_S
        with self.guard():
            while True:
                tries -= 1
                try:
                    if not self._is_open:
                        self._open()
                    found: _Found = sync(self._fs.loop, call, timeout=timeout_s)
                    return found
                except Exception as error:
                    translated = _as_os_error(error, timeout_s)
                    if tries and isinstance(translated, ConnectionError):
                        continue
                    if translated is error:
                        raise
                    raise translated from error

    async def _read(self, path: str, begin: int, end: int) -> bytes:
        if self._s3 is not None:
            return await self._s3.read(path, begin, end)
        if self._is_local:
            return await asyncio.to_thread(_read_plain, path, begin, end)
        return bytes(await self._fs._cat_file(path, start=begin, end=end))[: end - begin]

    async def _page(self, folder: str, after: str) -> tuple[dict[str, Object], list[tuple[str, str]]]:
        """Return one page of a folder's objects, and the pages to request next as (folder, token to continue after)."""
        path, more = self._path(folder), list[tuple[str, str]]()
        if self._s3 is not None:
            infos, after = await self._s3.page(path, after)
            more = [(folder, after)] if after else []
        else:
            try:
                infos = await self._fs._ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):  # for example, the folder was deleted meanwhile
                infos = []
            infos = [info for info in infos if not info.get("islink")]
            if "/" not in folder:  # no entry lies deeper, and a deep or endless tree would take for ever
                more = [(self._name(info), "") for info in infos if info["type"] == "directory"]
            infos = [info for info in infos if info["type"] == "file" and info["name"] != path]
        objects = ((self._name(info), _object(info)) for info in infos)
        return {name: each for name, each in objects if each is not None}, more

    def _name(self, info: Mapping[str, Any]) -> str:
        return str(info["name"])[len(self._root) + 1 :].rstrip("/")

    async def _heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        paths = [self._path(name) for name in names]
        if self._s3 is None and not self._is_local:
            found = await self._fs._cat_ranges(paths, 0, nbytes, batch_size=_MAX_PARALLEL)
            return [_head(each) for each in found]
        heads: list[bytes | None] = []
        for lo in range(0, len(paths), _MAX_PARALLEL):
            reads = (self._read(path, 0, nbytes) for path in paths[lo : lo + _MAX_PARALLEL])
            heads += [_head(each) for each in await asyncio.gather(*reads, return_exceptions=True)]
        return heads

    async def _publish(self, path: str, data: bytes) -> None:
        """Put the object in one step, or write a temporary file and rename it. A missing folder is created."""
        if self._s3 is not None:
            await self._s3.write(path, data)
            return
        if self._puts_whole:
            await self._fs._pipe_file(path, data)
            return
        temp = f"{path}.{self._token}.{next(self._serial)}{TEMPORARY}"
        try:
            try:
                await self._write_new(temp, data)
            except FileNotFoundError:
                await self._make(path.rsplit("/", 1)[0])
                await self._write_new(temp, data)
            await self._fs._mv(temp, path)
        except BaseException:
            await asyncio.gather(self._fs._rm_file(temp), return_exceptions=True)
            raise

    async def _write_new(self, path: str, data: bytes) -> None:
        """Write a new file; a local one is first created empty, with permissions only for those who may read it."""
        if self._is_local:
            await asyncio.to_thread(lambda: os.close(open_file(Path(path), os.O_WRONLY | os.O_EXCL)))
        await self._fs._pipe_file(path, data)

    async def _make(self, folder: str) -> None:
        if self._is_local:
            await asyncio.to_thread(make_folder, Path(folder))
        else:
            await self._fs._makedirs(folder, exist_ok=True)

    async def _mark(self, names: Sequence[str]) -> None:
        for lo in range(0, len(names), _MAX_PARALLEL):
            await _all(self._publish(self._path(name), b"") for name in names[lo : lo + _MAX_PARALLEL])

    async def _remove(self, names: Sequence[str]) -> None:
        for lo in range(0, len(names), _MAX_PARALLEL):
            deletions = (self._fs._rm_file(self._path(name)) for name in names[lo : lo + _MAX_PARALLEL])
            await _all(deletions, unless=(FileNotFoundError, IsADirectoryError))

    def _driver_error(self, scheme: str, error: ImportError) -> StoreError:
        cause = error.__cause__
        package = str(cause.name).split(".")[0] if isinstance(cause, ImportError) else "the package that fsspec names"
        extra = " (or ragfuse-kv[objects])" if package == "s3fs" else ""
        wanted = f"the package {package}, which reads {scheme}:// URLs"
        return self._store_error(wanted, "none", f"Install it: pip install {package}{extra}.")

    def _opening_error(self, error: OSError) -> Exception:
        """Return the exception to raise for an error at opening."""
        if isinstance(error, NO_ANSWER):
            return error
        text = shorten(str(error), 200)
        if not isinstance(error, PermissionError):
            return self._store_error("a folder", f"an error ({text})", "Give the URL of another folder.")
        remedy = "Set the credentials of this kind of store (for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        remedy += "AWS_PROFILE), with the right to list, read, write and delete."
        return self._store_error("access", f"a refusal ({text})", remedy)

    def _store_error(self, wanted: str, found: str, remedy: str) -> StoreError:
        return StoreError(f"The tier at {self.url} cannot be opened: wanted {wanted}, found {found}. {remedy}")


async def _all(calls: Iterable[Awaitable[object]], unless: tuple[type[Exception], ...] = ()) -> None:
    """Run calls in parallel and, when all have ended, raise the first error that is not one of `unless`."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, unless):
            raise result


def _object(info: Mapping[str, Any]) -> Object | None:
    """Parse a listing's record of an object; return None if its size is missing or impossible."""
    when, size = next((info[name] for name in _MODIFIED if info.get(name)), 0.0), info.get("size")
    if not isinstance(size, int) or not 0 <= size <= _MAX_OBJECT_NBYTES:
        return None
    if isinstance(when, datetime):
        return Object(size, when.timestamp())
    return Object(size, when if isinstance(when, int | float) and isfinite(when) else 0.0)


def _read_plain(path: str, begin: int, end: int) -> bytes:
    """Return bytes `begin` to `end` of a local file: fewer if it ends before, none if most of them are a hole."""
    try:
        fd = open_plain(path)
    except ValueError as error:
        raise FileNotFoundError(path) from error  # not a plain file, so no entry
    try:
        end, pieces = min(end, os.fstat(fd).st_size), list[bytes]()
        check_there(fd, begin, end)
        while begin < end and (piece := os.pread(fd, min(end - begin, _PIECE_NBYTES), begin)):
            pieces.append(piece)
            begin += len(piece)
        return b"".join(pieces)
    except ValueError:
        return b""
    finally:
        os.close(fd)


def _as_os_error(error: Exception, timeout_s: float = 0.0) -> OSError:
    """Translate a driver's exception into one of the errors that this module documents."""
    if isinstance(error, TimeoutError):
        return error if str(error) else TimeoutError(f"no answer within {timeout_s:g} s")
    if isinstance(error, socket.gaierror) or getattr(error, "errno", None) in _UNREACHABLE:
        return ConnectionError(str(error))
    if isinstance(error, OSError) and (error.errno is not None or type(error).__module__ == "builtins"):
        return error
    if any(_CREDENTIALS.search(cls.__name__) for cls in type(error).__mro__):
        return PermissionError(str(error))
    if isinstance(error, ValueError | TypeError | NotImplementedError) or "Validation" in type(error).__name__:
        return OSError(errno.EINVAL, f"{type(error).__name__}: {error}")
    return ConnectionError(f"{type(error).__name__}: {error}")


def _empty_past_end(error: OSError) -> bytes:
    """Return no bytes if `error` means that the object ends before the range; raise any other error."""
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, Mapping) else getattr(error, "code", None)
    if code in ("InvalidRange", "416", 416):
        return b""
    raise error


def _head(found: bytes | BaseException) -> bytes | None:
    """Return the first bytes of one of many objects; None if it does not exist, or if only this one cannot be read.

    Raises:
        OSError: The store does not answer, or refuses access to all objects.
    """
    if not isinstance(found, Exception):
        return bytes(found)  # type: ignore[arg-type]
    error = found if isinstance(found, FileNotFoundError) else _as_os_error(found)
    if isinstance(error, NO_ANSWER) or (isinstance(error, PermissionError) and error.errno is None):
        raise error from found
    with suppress(OSError):
        return _empty_past_end(error)
    return None
