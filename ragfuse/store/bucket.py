"""A folder behind an fsspec URL: listed, read in ranges, written whole, deleted. What objects mean is told elsewhere.

Every call ends in time and tries once. It raises FileNotFoundError for what is not there, ConnectionError or
TimeoutError where nobody answers, PermissionError or another OSError where the answer is no.
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
_AT_ONCE = 32
_SLOWEST_NBYTES_PER_S = 1e6
_OPENING_S = 5.0  # finding credentials may mean asking the machine's own metadata service
_LISTING_S = 600.0
_LONGEST_S = 3600.0
_LARGEST = 1 << 44
_PIECE_NBYTES = 1 << 24
_EMPTY = 1000
"""Pages without an object that a listing may have in a row."""
_PAGES = 1 << 13
"""Pages that a listing of an object store may have: of eight million objects."""
_UNREACHABLE = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT}
    | {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
    | {errno.EBUSY, errno.EREMOTEIO, errno.EIO}  # what drivers make of "slow down" and of a store's own failure
)
_CREDENTIALS = re.compile("Credential|Profile|Token")
_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "created")


class Object(NamedTuple):
    """One object of a listing: its bytes, and when it was written, in seconds since the epoch."""

    nbytes: int
    modified: float


class Bucket:
    """The folder at `url`. StoreError if it cannot be used as it is; `check` says whether somebody is there.

    `timeout_s` is how long there may be silence; data may take longer, by a second for each megabyte. What is written
    goes to this machine's own buffers first, so that over a slow link all of that may be silence. Object stores publish
    a put at once; elsewhere a file is written under a temporary name and renamed. Every call is made within `guard`.
    """

    def __init__(self, url: str, timeout_s: float, shared_with: SharedWith = "nobody") -> None:
        self.url = without_user(url)  # this name is for people
        self._s3: S3 | None = None
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext
        self._given, self._timeout_s = url, timeout_s
        self._token, self._serial, self._pid = uuid4().hex, count(), 0
        with suppress(*NO_ANSWER):  # some drivers connect when they are made; `check` will tell
            self._open()
            if self._is_local:
                self._make_folder(shared_with)

    def check(self, folder: str) -> dict[str, Object]:
        """What is in `folder`. StoreError if nothing can ever be there; NO_ANSWER if nobody answers."""
        found: dict[str, Object] = {}
        try:
            if self._s3 is not None:
                self._run(self._s3.prepare, extra_s=_OPENING_S)
            for page in self.listing(folder, _OPENING_S):
                found |= page
        except FileNotFoundError as error:
            raise self._refusal("an existing bucket", "none", "Make it, or give the URL of another.") from error
        except OSError as error:
            raise self._no_entry(error) from error
        try:
            info = self._run(lambda: self._fs._info(self._root), extra_s=_OPENING_S)
        except FileNotFoundError:
            return found  # an empty folder of an object store is not there
        except OSError as error:
            raise self._no_entry(error) from error
        if info["type"] == "file":
            raise self._refusal("a folder", "a file", "Give the URL of another, or a name below this one's folder.")
        return found

    def listing(self, folder: str, within_s: float = _LISTING_S) -> Iterator[dict[str, Object]]:
        """Every object below `folder`, by its name in here: a thousand at a time, or what lies in one folder."""
        left, firsts, n_empty, n_pages = [(folder, "")], set[tuple[str, str]](), 0, 0
        while left:
            asked = left.pop()
            n_pages += bool(asked[1])
            found, more = self._run(partial(self._page, *asked), extra_s=within_s)
            first = next(iter(found), "")
            n_empty = 0 if found else n_empty + bool(asked[1])
            if (first and (asked[0], first) in firsts) or n_empty > _EMPTY or n_pages > _PAGES or asked in more:
                raise OSError(errno.EPROTO, f"a listing of {folder} that never ends")
            firsts.add((asked[0], first))
            left += more
            yield found

    def read(self, name: str, begin: int, end: int) -> bytes:
        """These bytes of an object, by one request, or by a second one where the connection breaks; fewer where it ends
        before."""
        try:
            return self._run(lambda: self._read(self._path(name), begin, end), nbytes=end - begin, tries=2)
        except OSError as error:
            return _beyond(error)

    def heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        """The first bytes of each object, None where there is none: all asked for at once."""
        return self._run(
            lambda: self._heads(names, nbytes),
            nbytes=nbytes * len(names),
            extra_s=len(names) // _AT_ONCE * self._timeout_s,
        )

    def write(self, name: str, data: bytes) -> None:
        """The object, whole or not at all, in place of an earlier one."""
        self._run(lambda: self._publish(self._path(name), data), nbytes=len(data))

    def mark(self, names: Sequence[str]) -> None:
        """Empty objects of these names, written now: all at once."""
        self._run(lambda: self._mark(names), extra_s=len(names) // _AT_ONCE * self._timeout_s)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are gone already."""
        if names:
            self._run(lambda: self._remove(names), extra_s=len(names) // _AT_ONCE * self._timeout_s)

    def abort(self, folder: str, is_useless: Callable[[str, float], bool]) -> list[int]:
        """End uploads of which (name, seconds since they began) is useless; the bytes that each had left here.

        Only S3 keeps them, and lets them be paid for, until somebody does.
        """
        freed, n_empty, n_pages = list[int](), 0, 0
        after: dict[str, str] | None = {}
        while self._s3 is not None and after is not None:
            uploads, more = self._run(partial(self._s3.uploads, self._path(folder), after))
            n_empty, n_pages = 0 if uploads else n_empty + 1, n_pages + 1
            if (more and more == after) or n_empty > _EMPTY or n_pages > _PAGES:
                raise OSError(errno.EPROTO, f"a listing of uploads to {folder} that never ends")
            useless = [each for each in uploads if is_useless(self._name({"name": each.path}), each.age_s)]
            freed += [self._run(partial(self._s3.abort, each), extra_s=self._timeout_s) for each in useless]
            after = more or None
        return freed

    # inside

    def _open(self) -> None:
        """The file system, of this process: one that came along through a fork has lost its thread."""
        scheme = get_protocol(self._given)
        try:
            if "://" not in self._given:
                raise ValueError("no scheme")
            get_filesystem_class(scheme)
        except ValueError as error:
            wanted = "a URL like s3://bucket/folder, gs://bucket/folder or file:///folder"
            raise self._refusal(wanted, "one of no known kind", "Give another URL.") from error
        except ImportError as error:
            raise self._no_driver(scheme, error) from error
        try:
            plain, root = url_to_fs(self._given, **self._options(scheme))
        except Exception as error:
            raise self._no_entry(_told(error)) from error
        is_store = bool(plain.async_impl)
        self._root, self._is_local = str(root).rstrip("/"), isinstance(plain, LocalFileSystem)
        self._puts_whole = is_store or scheme == "memory"
        self._fs = plain if is_store else AsyncFileSystemWrapper(plain, asynchronous=False)
        self._fs.retries = 1  # s3fs has its own, around those of botocore
        self._s3 = S3(self._fs, self._timeout_s) if scheme in SCHEMES else None
        self._pid = os.getpid()

    def _options(self, scheme: str) -> dict[str, Any]:
        """What this kind of file system must be told; where to find servers and credentials it knows itself."""
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if scheme in SCHEMES:
            waits = {"connect_timeout": self._timeout_s, "read_timeout": _LONGEST_S}  # each call has its own end
            tries = {"retries": {"total_max_attempts": 1}, "max_pool_connections": _AT_ONCE}
            options["config_kwargs"] = {**waits, **tries}
        return options

    def _make_folder(self, shared_with: SharedWith) -> None:
        try:
            make_root(Path(self._root), shared_with)
        except (FileExistsError, NotADirectoryError) as error:
            raise self._refusal("a folder", f"a file ({error.filename})", "Give the URL of another.") from error
        except OSError as error:
            raise self._refusal("a folder", f"{error.strerror}", "Give the URL of another.") from error
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise self._refusal("a folder", "one without permission to write", "Give the URL of another.")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _run(
        self, call: Callable[[], Awaitable[_Found]], *, nbytes: int = 0, extra_s: float = 0.0, tries: int = 1
    ) -> _Found:
        """What the call gives, in time; called only once the file system is this process's own."""
        patience_s = self._timeout_s + extra_s + nbytes / _SLOWEST_NBYTES_PER_S
        with self.guard():
            while True:
                tries -= 1
                try:
                    if self._pid != os.getpid():
                        self._open()
                    found: _Found = sync(self._fs.loop, call, timeout=patience_s)
                    return found
                except Exception as error:
                    told = _told(error, patience_s)
                    if tries and isinstance(told, ConnectionError):
                        continue
                    if told is error:
                        raise
                    raise told from error

    async def _read(self, path: str, begin: int, end: int) -> bytes:
        if self._s3 is not None:
            return await self._s3.read(path, begin, end)
        if self._is_local:
            return await asyncio.to_thread(_read_plain, path, begin, end)
        return bytes(await self._fs._cat_file(path, start=begin, end=end))[: end - begin]

    async def _page(self, folder: str, after: str) -> tuple[dict[str, Object], list[tuple[str, str]]]:
        """Some objects of a folder, or what lies in it, and what is to be asked next: folders, after what in them."""
        path, more = self._path(folder), list[tuple[str, str]]()
        if self._s3 is not None:
            infos, after = await self._s3.page(path, after)
            more = [(folder, after)] if after else []
        else:
            try:
                infos = await self._fs._ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):  # nor are objects of a folder that was deleted meanwhile
                infos = []
            infos = [info for info in infos if not info.get("islink")]
            if "/" not in folder:  # nothing of ours lies deeper, and who follows all ways may never come back
                more = [(self._name(info), "") for info in infos if info["type"] == "directory"]
            infos = [info for info in infos if info["type"] == "file" and info["name"] != path]
        objects = ((self._name(info), _object(info)) for info in infos)
        return {name: each for name, each in objects if each is not None}, more

    def _name(self, info: Mapping[str, Any]) -> str:
        return str(info["name"])[len(self._root) + 1 :].rstrip("/")

    async def _heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        paths = [self._path(name) for name in names]
        if self._s3 is None and not self._is_local:
            found = await self._fs._cat_ranges(paths, 0, nbytes, batch_size=_AT_ONCE)
            return [_head(each) for each in found]
        heads: list[bytes | None] = []
        for lo in range(0, len(paths), _AT_ONCE):
            some = (self._read(path, 0, nbytes) for path in paths[lo : lo + _AT_ONCE])
            heads += [_head(each) for each in await asyncio.gather(*some, return_exceptions=True)]
        return heads

    async def _publish(self, path: str, data: bytes) -> None:
        """Put at once, or write beside and rename; a missing folder is made."""
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
        """A file that is not there; on this machine made first for those alone who may read it."""
        if self._is_local:
            await asyncio.to_thread(lambda: os.close(open_file(Path(path), os.O_WRONLY | os.O_EXCL)))
        await self._fs._pipe_file(path, data)

    async def _make(self, folder: str) -> None:
        if self._is_local:
            await asyncio.to_thread(make_folder, Path(folder))
        else:
            await self._fs._makedirs(folder, exist_ok=True)

    async def _mark(self, names: Sequence[str]) -> None:
        for lo in range(0, len(names), _AT_ONCE):
            await _all(self._publish(self._path(name), b"") for name in names[lo : lo + _AT_ONCE])

    async def _remove(self, names: Sequence[str]) -> None:
        for lo in range(0, len(names), _AT_ONCE):
            some = (self._fs._rm_file(self._path(name)) for name in names[lo : lo + _AT_ONCE])
            await _all(some, unless=(FileNotFoundError, IsADirectoryError))

    def _no_driver(self, scheme: str, error: ImportError) -> StoreError:
        cause = error.__cause__
        package = str(cause.name).split(".")[0] if isinstance(cause, ImportError) else "the package that fsspec names"
        extra = " (or ragfuse-kv[objects])" if package == "s3fs" else ""
        wanted = f"the package {package}, which reads {scheme}:// URLs,"
        return self._refusal(wanted, "none", f"Install it: pip install {package}{extra}.")

    def _no_entry(self, error: OSError) -> Exception:
        """What to raise for an error at opening."""
        if isinstance(error, NO_ANSWER):
            return error
        said = shorten(str(error), 200)
        if not isinstance(error, PermissionError):
            return self._refusal("a folder", f"an error ({said})", "Give the URL of another.")
        do = "Set the credentials of this kind of store (for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        do += "AWS_PROFILE), with the right to list, read, write and delete."
        return self._refusal("access", f"a refusal ({said})", do)

    def _refusal(self, wanted: str, found: str, do: str) -> StoreError:
        return StoreError(f"The tier at {self.url} cannot be opened: {wanted} was wanted, {found} was found. {do}")


async def _all(calls: Iterable[Awaitable[object]], unless: tuple[type[Exception], ...] = ()) -> None:
    """Make these calls at once; what one of them raises, when all have ended."""
    for done in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(done, BaseException) and not isinstance(done, unless):
            raise done


def _object(info: Mapping[str, Any]) -> Object | None:
    """What a listing says of an object; None where it says nothing that can be."""
    when, size = next((info[name] for name in _MODIFIED if info.get(name)), 0.0), info.get("size")
    if not isinstance(size, int) or not 0 <= size <= _LARGEST:
        return None
    if isinstance(when, datetime):
        return Object(size, when.timestamp())
    return Object(size, when if isinstance(when, int | float) and isfinite(when) else 0.0)


def _read_plain(path: str, begin: int, end: int) -> bytes:
    """These bytes of a file on this machine, fewer where it ends before, or has a hole."""
    try:
        fd = open_plain(path)
    except ValueError as error:
        raise FileNotFoundError(path) from error  # nothing of ours is there
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


def _told(error: Exception, patience_s: float = 0.0) -> OSError:
    """The same as one of the errors that are told of above."""
    if isinstance(error, TimeoutError):
        return error if str(error) else TimeoutError(f"no answer within {patience_s:g} s")
    if isinstance(error, socket.gaierror) or getattr(error, "errno", None) in _UNREACHABLE:
        return ConnectionError(str(error))
    if isinstance(error, OSError) and (error.errno is not None or type(error).__module__ == "builtins"):
        return error
    if any(_CREDENTIALS.search(cls.__name__) for cls in type(error).__mro__):
        return PermissionError(str(error))
    if isinstance(error, ValueError | TypeError | NotImplementedError) or "Validation" in type(error).__name__:
        return OSError(errno.EINVAL, f"{type(error).__name__}: {error}")
    return ConnectionError(f"{type(error).__name__}: {error}")


def _beyond(error: OSError) -> bytes:
    """No bytes, where `error` says that the object ends before the range; else it is raised."""
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, Mapping) else getattr(error, "code", None)
    if code in ("InvalidRange", "416", 416):
        return b""
    raise error


def _head(found: bytes | BaseException) -> bytes | None:
    """The first bytes of one object of many; None for one that is not there, or that alone cannot be read."""
    if not isinstance(found, Exception):
        return bytes(found)  # type: ignore[arg-type]
    error = found if isinstance(found, FileNotFoundError) else _told(found)
    if isinstance(error, NO_ANSWER) or (isinstance(error, PermissionError) and error.errno is None):
        raise error from found
    with suppress(OSError):
        return _beyond(error)
    return None
