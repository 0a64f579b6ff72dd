"""What only S3 offers an object tier, beyond what all of fsspec's file systems do. Everything else is `bucket.py`'s."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

SCHEMES = ("s3", "s3a")

_Found = TypeVar("_Found")
_READ_NBYTES = 1 << 20
_PAGE_OBJECTS = 1000
_ONE_PUT_NBYTES = 100 << 20
"""From here on s3fs sends an object in parts, of which it hears one by one; the whole is asked for at the end."""
_ETAG = re.compile(r'(?:W/)?"?[0-9a-fA-F]{32}(?:-[0-9]+)?"?')
"""What S3 says of every object that it has taken."""


class Upload(NamedTuple):
    """An object that comes in parts: where to, the upload's name, and how long ago it was begun."""

    path: str
    id: str
    age_s: float


class S3:
    """Calls of an s3fs file system that waits for any answer: none of these is silent for longer than `silence_s`."""

    def __init__(self, fs: Any, silence_s: float) -> None:
        self._fs, self._silence_s = fs, silence_s

    async def prepare(self) -> None:
        """Look for credentials, which may mean asking somebody else for long."""
        await self._fs.set_session()
        if not self._fs.anon and not self._fs.key:
            await self._fs.session.get_credentials()

    async def page(self, path: str, after: str) -> tuple[list[dict[str, Any]], str]:
        """Some objects below a folder (name, size, LastModified), and what to go on after, "" at the end."""
        bucket, key, _ = self._fs.split_path(f"{path}/")
        more = {"ContinuationToken": after} if after else {}
        call = self._fs._call_s3("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=_PAGE_OBJECTS, **more)
        found = await self._heard(call)
        if not {"Name", "KeyCount", "IsTruncated"} & found.keys():  # a page of a proxy's, or an error with status 200
            raise ConnectionError("the answer to a listing is none of S3's")
        infos = found.get("Contents", ())
        named = [{**info, "name": f"{bucket}/{info['Key']}", "size": info["Size"]} for info in infos]
        return named, found.get("NextContinuationToken", "")

    async def uploads(self, path: str, after: Mapping[str, str]) -> tuple[list[Upload], dict[str, str]]:
        """Some uploads in parts that were begun below a folder and not ended, and what to go on after."""
        bucket, key, _ = self._fs.split_path(f"{path}/")
        found = await self._heard(self._fs._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key, **after))
        sent = found["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(sent) if sent else datetime.now(UTC)  # the server's own clock, where it tells
        uploads = [
            Upload(f"{bucket}/{each['Key']}", each["UploadId"], (now - each["Initiated"]).total_seconds())
            for each in found.get("Uploads", ())
        ]
        marks = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        return uploads, {name: found[mark] for name, mark in marks.items()} if found.get("IsTruncated") else {}

    async def abort(self, upload: Upload) -> int:
        """End an upload that will never be whole; how many bytes were there."""
        bucket, key, _ = self._fs.split_path(upload.path)
        which = {"Bucket": bucket, "Key": key, "UploadId": upload.id}
        try:
            parts = await self._heard(self._fs._call_s3("list_parts", **which))
            await self._heard(self._fs._call_s3("abort_multipart_upload", **which))
        except FileNotFoundError:  # somebody else has ended it
            return 0
        return sum(part["Size"] for part in parts.get("Parts", ()))

    async def read(self, path: str, begin: int, end: int) -> bytes:
        """These bytes of an object; fewer where it ends before."""
        bucket, key, _ = self._fs.split_path(path)
        asked = self._fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}")
        pieces, left = list[bytes](), end - begin
        async with (await self._heard(asked))["Body"] as body:
            while left > 0 and (piece := await self._heard(body.read(min(left, _READ_NBYTES)))):
                pieces.append(piece)
                left -= len(piece)
        return b"".join(pieces)

    async def write(self, path: str, data: bytes) -> None:
        """Put an object whole; ConnectionError where what answers is no object store."""
        bucket, key, _ = self._fs.split_path(path)
        if len(data) > _ONE_PUT_NBYTES:
            await self._fs._pipe_file(path, data)
            found = await self._heard(self._fs._call_s3("head_object", Bucket=bucket, Key=key))
            is_there = found.get("ContentLength") == len(data)
        else:
            found = await self._fs._call_s3("put_object", Bucket=bucket, Key=key, Body=data)
            is_there = True
        if not is_there or not _ETAG.fullmatch(str(found.get("ETag", ""))):  # a login page comes with status 200, too
            raise ConnectionError("the answer to a write is none of S3's")

    async def _heard(self, call: Awaitable[_Found]) -> _Found:
        try:
            return await asyncio.wait_for(call, self._silence_s)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._silence_s:g} s") from error
