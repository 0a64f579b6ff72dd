"""Requests that are specific to S3. `bucket.py` makes all others, through the interface of any fsspec file system."""

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
"""Most bytes of an object that is written by one put; s3fs uploads a larger one in parts, and `write` checks it."""
_ETAG = re.compile(r'(?:W/)?"?[0-9a-fA-F]{32}(?:-[0-9]+)?"?')
"""The ETag that S3 returns for every object that it has stored."""


class Upload(NamedTuple):
    """A multipart upload under way: the object's path, the upload's id, and its age in seconds."""

    path: str
    id: str
    age_s: float


class S3:
    """Calls to S3 through s3fs.

    Args:
        fs: The s3fs file system.
        silence_s: Seconds without an answer after which a call raises TimeoutError. The data of `write` may take
            longer; its caller sets that limit.
    """

    def __init__(self, fs: Any, silence_s: float) -> None:
        self._fs, self._silence_s = fs, silence_s

    async def prepare(self) -> None:
        """Open a session and find credentials, which may take a slow request to another service."""
        await self._fs.set_session()
        if not self._fs.anon and not self._fs.key:
            await self._fs.session.get_credentials()

    async def page(self, path: str, after: str) -> tuple[list[dict[str, Any]], str]:
        """Return one page of the objects below a folder.

        Args:
            path: The folder.
            after: The token that the previous page returned; "" for the first page.

        Returns:
            A record of each object (name, size, LastModified), and the token of the next page, "" after the last.

        Raises:
            ConnectionError: The answer does not come from S3.
        """
        bucket, key, _ = self._fs.split_path(f"{path}/")
        more = {"ContinuationToken": after} if after else {}
        call = self._fs._call_s3("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=_PAGE_OBJECTS, **more)
        found = await self._answer(call)
        if not {"Name", "KeyCount", "IsTruncated"} & found.keys():  # a proxy's page, or an error with status 200
            raise ConnectionError("the answer to a listing is not S3's: check the endpoint and any proxy")
        infos = found.get("Contents", ())
        named = [{**info, "name": f"{bucket}/{info['Key']}", "size": info["Size"]} for info in infos]
        return named, found.get("NextContinuationToken", "")

    async def uploads(self, path: str, after: Mapping[str, str]) -> tuple[list[Upload], dict[str, str]]:
        """Return one page of the unfinished multipart uploads to a folder.

        Args:
            path: The folder.
            after: The markers that the previous page returned; empty for the first page.

        Returns:
            The uploads, and the markers of the next page, empty after the last.
        """
        bucket, key, _ = self._fs.split_path(f"{path}/")
        found = await self._answer(self._fs._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key, **after))
        sent = found["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(sent) if sent else datetime.now(UTC)  # by the server's clock, if it sends a date
        uploads = [
            Upload(f"{bucket}/{each['Key']}", each["UploadId"], (now - each["Initiated"]).total_seconds())
            for each in found.get("Uploads", ())
        ]
        marks = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        return uploads, {name: found[mark] for name, mark in marks.items()} if found.get("IsTruncated") else {}

    async def abort(self, upload: Upload) -> int:
        """Abort a multipart upload and return the bytes that it had stored; 0 if it has ended already."""
        bucket, key, _ = self._fs.split_path(upload.path)
        which = {"Bucket": bucket, "Key": key, "UploadId": upload.id}
        try:
            parts = await self._answer(self._fs._call_s3("list_parts", **which))
            await self._answer(self._fs._call_s3("abort_multipart_upload", **which))
        except FileNotFoundError:  # it was completed or aborted meanwhile
            return 0
        return sum(part["Size"] for part in parts.get("Parts", ()))

    async def read(self, path: str, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` (exclusive) of an object, fewer if it ends before."""
        bucket, key, _ = self._fs.split_path(path)
        request = self._fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}")
        pieces, remaining = list[bytes](), end - begin
        async with (await self._answer(request))["Body"] as body:
            while remaining > 0 and (piece := await self._answer(body.read(min(remaining, _READ_NBYTES)))):
                pieces.append(piece)
                remaining -= len(piece)
        return b"".join(pieces)

    async def write(self, path: str, data: bytes) -> None:
        """Write an object, which appears whole or not at all.

        Raises:
            ConnectionError: The answer does not come from S3, so the object may not be stored.
        """
        bucket, key, _ = self._fs.split_path(path)
        if len(data) > _ONE_PUT_NBYTES:
            await self._fs._pipe_file(path, data)
            found = await self._answer(self._fs._call_s3("head_object", Bucket=bucket, Key=key))
            is_there = found.get("ContentLength") == len(data)
        else:
            found = await self._fs._call_s3("put_object", Bucket=bucket, Key=key, Body=data)
            is_there = True
        if not is_there or not _ETAG.fullmatch(str(found.get("ETag", ""))):  # for example, a login page with status 200
            raise ConnectionError("the answer to a write is not S3's: check the endpoint and any proxy")

    async def _answer(self, call: Awaitable[_Found]) -> _Found:
        try:
            return await asyncio.wait_for(call, self._silence_s)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._silence_s:g} s") from error
