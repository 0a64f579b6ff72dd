"""Documents that a tenant sends: split into passages, encoded in the background, and searched by their embeddings.

A document that is ready is in the file of `DocumentRecords`, so that it is there after a restart and for other servers
over the same folder; the KV of its passages is in the store. With a document goes the KV that was encoded for the list
alone: what the store had before stays.

Where the server ends while a document is being encoded, the KV of the passages that are done stays: it is found by its
content, so that the document goes on from there when it is sent again, and it is the list's (`DocumentRecords.claim`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from ragfuse.engine.engine import Engine
from ragfuse.errors import InputError, RagFuseError, StoreError
from ragfuse.serve.document_records import DocumentRecord, DocumentRecords
from ragfuse.serve.entries import StillStored, freed, stored_chunks, stored_kv
from ragfuse.serve.keys import APITenant
from ragfuse.serve.refusals import APIError, api_error_of
from ragfuse.serve.service import Service
from ragfuse.serve.split import passages
from ragfuse.serve.upload_text import text_of_pdf, text_of_type
from ragfuse.store.deletion import Chunk, leave_source
from ragfuse.text.mended import mended
from ragfuse.types.ingested import Ingested
from ragfuse.types.keys import token_digest

log = logging.getLogger("ragfuse.serve")

MAX_LISTED = 100
"""Most documents in a tenant's list."""
MAX_DOCUMENT_CHARS = 400_000
"""Most characters of a document."""
SUFFIXES = MappingProxyType(
    {
        "text/html": ".html",
        "application/xhtml+xml": ".html",
        "text/csv": ".csv",
        "application/json": ".json",
        "application/x-ndjson": ".ndjson",
        "application/jsonl": ".jsonl",
        "application/x-ipynb+json": ".ipynb",
    }
)
"""The type of file that a media type means; other texts are plain."""
BATCH_PASSAGES = 4
"""Passages that are encoded in one turn; between two turns other requests are answered."""
BUSY_S = 2.0
"""Seconds after which a turn is asked for again where the queue was full."""
BUSY_STATUSES = (429, 504)
"""Statuses of a queue that has no turn now."""
STORED_BEFORE = "stored before"
TOO_SHORT = "too short to be stored: computed with each question"
NOT_STORED = "not stored: this model's KV cannot be reused; computed with each question"
KV_GONE = "not stored any more, as their KV was deleted or evicted: encoded again with a question about them"
NOT_LISTED = "could not be saved: it is forgotten when the server ends"
_NAME_CHARS = 240
"""Characters of a document's name in the source of a passage."""
COUNTS = ("encoded", "stored_before", "too_short", "unstored", "tokens", "nbytes", "seconds")
"""What is counted while a document is encoded, as attributes of `StoredDocument`."""


@dataclass(eq=False)
class StoredDocument:
    """One document and how far its passages are.

    Args:
        name: Its name, for people.
        text: Its text, as it was sent until it is read by its type; "" until it is read from `pdf`.
        pdf: The PDF that it is to be read from.
        suffix: The type that `text` is to be read by, such as ".html".
        encoded: Passages that are done: encoded, or found to be stored or too short.
        stored_before: Those whose KV the store had already.
        too_short: Those that are too short to be stored.
        unstored: Those that are long enough, and not stored all the same.
        tokens: Tokens of the passages that are done.
        nbytes: Bytes of their KV, encoded now or stored before.
        replaced: Passages of documents of the same name, which this one replaces.
        replaced_ids: The ids of these documents.
        is_saved: Whether it is in the file.
        chunks: What its passages are in the store, in their order; None: not looked up yet.
        missing: Passages that were stored and are not any more, when it was last looked.
    """

    name: str
    text: str = ""
    pdf: bytes = b""
    suffix: str = ""
    id: str = field(default_factory=lambda: f"doc_{uuid4().hex[:24]}")
    status: str = "waiting"
    error: str = ""
    passages: list[str] = field(default_factory=list)
    vectors: list[NDArray[np.float32]] = field(default_factory=list)
    encoded: int = 0
    stored_before: int = 0
    too_short: int = 0
    unstored: int = 0
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    replaced: list[str] = field(default_factory=list)
    replaced_ids: list[str] = field(default_factory=list)
    is_deleted: bool = False
    is_saved: bool = False
    chunks: list[Chunk] | None = None
    missing: int = 0

    @classmethod
    def of(cls, record: DocumentRecord, vectors: NDArray[np.float32]) -> StoredDocument:
        """Return the document of a record."""
        document = cls(record.name, id=record.id, status="ready", passages=record.passages, is_saved=True)
        document.vectors = list(vectors)
        for name, count in record.counts.items():
            if name in COUNTS:
                setattr(document, name, count)
        return document

    def record(self, own: Collection[str]) -> DocumentRecord:
        """Return what is saved of it.

        Args:
            own: The passages whose KV was encoded for documents of the list.
        """
        mine = [passage for passage in self.passages if passage in own]
        counts = {name: getattr(self, name) for name in COUNTS}
        return DocumentRecord(self.id, self.name, self.passages, mine, counts, np.stack(self.vectors))

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain JSON types, without its text."""
        names = ("id", "name", "status", "error", "encoded", "stored_before", "too_short", "tokens", "nbytes")
        fields = {name: getattr(self, name) for name in names}
        return {
            "object": "ragfuse.document",
            **fields,
            "passages": len(self.passages),
            "seconds": round(self.seconds, 2),
            "note": self.note,
        }

    @property
    def note(self) -> str:
        """For people: which passages were not encoded now, and why; "" where all were, or are yet to be."""
        is_unsaved = self.status == "ready" and not self.is_saved
        notes = [
            (why if n == self.encoded else f"{n} of {self.encoded} passages {why}")
            for n, why in (
                (self.stored_before, STORED_BEFORE),
                (self.too_short, TOO_SHORT),
                (self.unstored, NOT_STORED),
                (self.missing, KV_GONE),
            )
            if n
        ]
        return "; ".join([*notes, *([NOT_LISTED] if is_unsaved else [])])


class TenantDocuments:
    """The documents of one tenant, encoded one after the other. Use it from the event loop.

    Args:
        service: The service.
        tenant: The tenant.
        records: The file of documents.
    """

    def __init__(self, service: Service, tenant: APITenant, records: DocumentRecords) -> None:
        self._service, self._tenant, self._records = service, tenant, records
        self.all: dict[str, StoredDocument] = {}
        self._own: set[str] = set()  # passages whose KV was encoded for documents of the list, which the store had not
        self._has_claims = False  # whether `_own` has what was encoded for documents that a server did not finish
        self._hidden = set[str]()  # ids in the file that are not listed: removed or replaced just now, or damaged
        self._waiting: deque[StoredDocument] = deque()
        self._task: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Take in what is in the file, also from before the server started, and drop what is not in it any more."""
        if not self._has_claims:
            self._own.update(await asyncio.to_thread(self._records.claims, self._tenant.salt))
            self._has_claims = True
        saved_before = [id for id, each in self.all.items() if each.is_saved]
        ids = await asyncio.to_thread(self._records.ids, self._tenant.salt)
        for id in ids:
            if id not in self.all and id not in self._hidden:
                found = await asyncio.to_thread(self._read, id)
                if found is None:
                    self._hidden.add(id)
                elif id not in self._hidden:
                    document, own = found
                    self.all.setdefault(id, document)
                    self._own.update(own)
        for id in set(saved_before).difference(ids):
            self.all.pop(id, None)
        self._hidden.intersection_update(ids)

    def add(self, document: StoredDocument) -> None:
        """Add a document and begin to encode it. It replaces one of the same name, whose KV goes once it is ready.

        Raises:
            APIError: There are too many documents (400).
        """
        replaced = [each for each in self.all.values() if each.name == document.name]
        if len(self.all) - len(replaced) >= MAX_LISTED:
            raise APIError(
                400,
                f"There are {len(self.all)} documents already, of at most {MAX_LISTED}. Delete one first.",
                "many",
            )
        for each in replaced:
            self._remove(each)
            document.replaced += [*each.passages, *each.replaced]
            document.replaced_ids += [each.id, *each.replaced_ids]
        self.all[document.id] = document
        self._waiting.append(document)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._encode_all())

    def get(self, id: str) -> StoredDocument:
        """Return a document; APIError (404) where there is none."""
        if id not in self.all:
            raise APIError(
                404, f"There is no document '{id:.80}' here. List them at /v1/ragfuse/documents.", "not_found"
            )
        return self.all[id]

    def remove(self, id: str) -> Callable[[Engine], dict[str, Any]]:
        """Remove a document from the list; return what deletes its KV, and returns what that freed (`freed`).

        KV that the store had before, and that of passages which another source has, stays. Where KV may still be stored
        afterwards, or the file of documents cannot be written, the document is in the list again.
        """
        document, loop = self.get(id), asyncio.get_running_loop()
        self._remove(document)
        own = self._disowned(document.passages)

        def forget(engine: Engine) -> dict[str, Any]:
            try:
                alone = _left(engine, document.name, document.passages, own)
                chunks = {(engine.digest, token_digest(engine.tokens(text))) for text in alone}
                done = freed(engine, lambda: engine.forget(alone) if alone else 0, chunks)
                self._records.delete(self._tenant.salt, [id])
                self._records.disclaim(self._tenant.salt, own)
            except (StillStored, StoreError):
                loop.call_soon_threadsafe(self._restore, document, own)
                raise
            return done

        return forget

    @property
    def is_encoding(self) -> bool:
        """Whether a document is being encoded, or waits for it."""
        return self._task is not None and not self._task.done()

    def look(self, engine: Engine) -> None:
        """Count anew what the store has of the documents that are ready: KV may have been deleted or evicted.

        It may block.
        """
        ready = [each for each in self.all.values() if each.status == "ready"]
        for each in ready:
            if each.chunks is None:
                each.chunks = [(engine.digest, token_digest(engine.tokens(text))) for text in each.passages]
        stored = iter(stored_chunks(engine, [chunk for each in ready for chunk in each.chunks or ()]))
        for each in ready:
            nbytes = [next(stored) for _ in each.passages]
            each.missing = max(0, nbytes.count(None) - each.too_short - each.unstored)
            each.nbytes = sum(n for n in nbytes if n is not None) or (0 if each.missing else each.nbytes)

    def search(self, query: str, top_k: int, ids: Sequence[str] | None) -> list[dict[str, Any]]:
        """Return the passages that are closest to a query, closest first; each text once. It may block."""
        chosen = [self.get(id) for id in ids] if ids is not None else list(self.all.values())
        found = [(each, at) for each in chosen for at in range(len(each.vectors))]
        if not found:
            return []
        table = np.stack([each.vectors[at] for each, at in found])
        scores = table @ self._service.embedder.embed([query])[0]
        best = dict[str, int]()  # where each text is, as other documents may be copies
        for place in np.argsort(-scores, kind="stable").tolist():
            document, at = found[place]
            best.setdefault(document.passages[at].strip(), place)
            if len(best) == top_k:
                break
        return [_hit(*found[place], float(scores[place])) for place in best.values()]

    # inside

    def _disowned(self, texts: Iterable[str]) -> list[str]:
        """Return those of these passages that no document of the list has and that were encoded for one of it."""
        kept = {passage for each in self.all.values() for passage in each.passages}
        found = [text for text in dict.fromkeys(texts) if text in self._own and text not in kept]
        self._own.difference_update(found)
        return found

    def _remove(self, document: StoredDocument) -> None:
        document.is_deleted = True
        self._hidden.add(document.id)
        self.all.pop(document.id, None)

    def _restore(self, document: StoredDocument, own: Iterable[str]) -> None:
        """List a document again that was removed, with the passages whose KV was encoded for it."""
        document.is_deleted = False
        self._hidden.discard(document.id)
        self.all[document.id] = document
        self._own.update(own)

    def _read(self, id: str) -> tuple[StoredDocument, list[str]] | None:
        """Return a document of the file, and the passages whose KV was encoded for it. It may block."""
        record = self._records.read(self._tenant.salt, id)
        if record is None:
            return None
        vectors = record.vectors
        if vectors is None:  # another embedder made them
            vectors = self._service.embedder.embed(record.passages)
            self._records.add(self._tenant.salt, replace(record, vectors=vectors))
        return StoredDocument.of(record, vectors), record.own

    async def _save(self, document: StoredDocument) -> None:
        """Write a document to the file, in place of those that it replaces; a deleted one takes these with it."""
        salt = self._tenant.salt
        try:
            if not document.is_deleted:
                record = document.record(self._own)
                await asyncio.to_thread(self._records.add, salt, record)
                document.is_saved = True
            gone = [*document.replaced_ids, *([document.id] if document.is_deleted else [])]
            await asyncio.to_thread(self._records.delete, salt, gone)
        except StoreError as error:
            log.error("A document is listed, but could not be saved: %s", error)

    async def _encode_all(self) -> None:
        while self._waiting:
            document = self._waiting.popleft()
            if document.is_deleted:
                continue
            try:
                await self._encode(document)
            except Exception as error:
                document.status, document.error = "failed", api_error_of(error).message
                self._hidden.difference_update(document.replaced_ids)  # they are still in the file

    async def _encode(self, document: StoredDocument) -> None:
        began_s, document.status = time.monotonic(), "reading"
        if document.pdf:
            text = await asyncio.to_thread(text_of_pdf, document.pdf)
        else:
            text = await asyncio.to_thread(text_of_type, document.text, document.suffix, MAX_DOCUMENT_CHARS)
        document.text, document.pdf = checked(mended(text, f"'{document.name}'")), b""
        document.passages = await self._turn(lambda engine: _split(engine, document.text))
        document.text, document.status = "", "encoding"
        before = dict(zip(document.passages, await self._stored(document.passages), strict=True))
        for at in range(0, len(document.passages), BATCH_PASSAGES):
            await self._batch(document, document.passages[at : at + BATCH_PASSAGES], before)
            document.seconds = time.monotonic() - began_s
            if document.is_deleted:
                break
        await self._save(document)
        document.status = "ready"
        left = set(document.replaced).difference(() if document.is_deleted else document.passages)
        left.update(document.passages if document.is_deleted else ())
        own = self._disowned(left)
        if left:
            await self._turn(lambda engine: _forget(engine, document.name, left, own))
            await self._note(self._records.disclaim, own)

    async def _batch(self, document: StoredDocument, texts: list[str], before: dict[str, int | None]) -> None:
        """Encode some passages; `before` has the bytes of KV that the store had of each, None for none."""
        encoded = Counter[str]()  # bytes of new KV of each passage, also where a later one failed
        new = [text for text in texts if before[text] is None]
        await self._note(self._records.claim, new)
        try:
            n_tokens = await self._turn(lambda engine: _ingest(engine, texts, document.name, encoded))
        finally:
            self._own.update(text for text in new if encoded[text])
            await self._note(self._records.disclaim, [text for text in new if not encoded[text]])
        shortest = self._service.settings.min_chunk_tokens
        missing = [text for text in texts if not encoded[text] and before[text] is None]
        if missing:  # too short, or stored since by another request
            before = {**before, **dict(zip(missing, await self._stored(missing), strict=True))}
        for text, tokens in zip(texts, n_tokens, strict=True):
            stored, n = before[text], encoded[text]
            document.tokens += tokens
            document.nbytes += n or stored or 0
            document.stored_before += stored is not None
            document.too_short += stored is None and tokens < shortest
            document.unstored += stored is None and not n and tokens >= shortest
        document.vectors += list(await self._turn(lambda _: self._service.embedder.embed(texts)))
        document.encoded += len(texts)

    async def _note(self, write: Callable[[str, Sequence[str]], None], passages: Sequence[str]) -> None:
        """Write down whose the KV of some passages is; without it, it stays when their document is deleted."""
        try:
            if passages:
                await asyncio.to_thread(write, self._tenant.salt, passages)
        except StoreError as error:
            log.error("Whose the KV of a document is could not be saved: %s", error)

    async def _stored(self, texts: Sequence[str]) -> list[int | None]:
        """Return the bytes of KV that the store has of each text; None for none."""
        found: list[int | None] = await self._turn(lambda engine: stored_kv(engine, texts))
        return found

    async def _turn(self, do: Callable[[Engine], Any]) -> Any:
        """Return the result of `do`, run when its turn in the request queue has come."""
        while True:
            try:
                return await self._service.work(self._tenant, lambda engine, _: do(engine))
            except APIError as error:
                if error.status not in BUSY_STATUSES:
                    raise
                await asyncio.sleep(error.retry_s or BUSY_S)


class DocumentLists:
    """The documents of all tenants."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._by_tenant: dict[str, TenantDocuments] = {}

    async def of(self, tenant: APITenant) -> TenantDocuments:
        """Return a tenant's documents, as the file has them now."""
        if tenant.salt not in self._by_tenant:
            self._by_tenant[tenant.salt] = TenantDocuments(self._service, tenant, self._service.documents)
        found = self._by_tenant[tenant.salt]
        await found.refresh()
        return found


def checked(text: str) -> str:
    """Return a document's text; InputError where it is empty or too long."""
    if not text.strip():
        raise InputError("The document has no text; leave it out.", "text")
    if len(text) > MAX_DOCUMENT_CHARS:
        raise InputError(
            f"The document has {len(text):,} characters; wanted {MAX_DOCUMENT_CHARS:,} at most. Send it in parts, each "
            "with a name of its own.",
            "text",
        )
    return text


def suffix_of(name: str, media_type: str | None) -> str:
    """Return the type that a document's text is read by, as the end of a file's name.

    Args:
        name: The document's name, which says it where there is no media type.
        media_type: Its media type.

    Raises:
        InputError: The media type is not one of `SUFFIXES`, nor another one of plain text.
    """
    if media_type is None:
        return PurePosixPath(name).suffix.lower()
    found = media_type.partition(";")[0].strip().lower()
    if found not in SUFFIXES and not found.startswith("text/"):
        raise InputError(
            f"media_type is {media_type!r:.60}; wanted text/plain or another text, or one of "
            f"{', '.join(SUFFIXES)}. Send a PDF as pdf.",
            "media_type",
        )
    return SUFFIXES.get(found, "")


def pdf_of(encoded: str) -> bytes:
    """Return the PDF in a base64 text; InputError where it is none."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("pdf is not valid base64; encode the file's bytes.", "pdf") from None
    if not data.lstrip()[:5].startswith(b"%PDF-"):
        raise InputError("pdf is not a PDF: it does not begin with %PDF-. Send other files as text.", "pdf")
    return data


def _split(engine: Engine, text: str) -> list[str]:
    found = list(passages(text, engine.settings.chunk_tokens, lambda each: len(engine.tokens(each))))
    if not found:
        raise RagFuseError("The document has no text; leave it out.")
    return list(dict.fromkeys(found))


def _ingest(engine: Engine, texts: Sequence[str], source: str, encoded: Counter[str]) -> list[int]:
    """Encode passages unless they are stored; add the bytes of new KV of each to `encoded`, and return their tokens."""
    nbytes = 0

    def progress(done: Ingested) -> None:
        nonlocal nbytes
        encoded[texts[done.chunks - 1]] += done.nbytes - nbytes
        nbytes = done.nbytes

    n_tokens = [len(engine.tokens(text)) for text in texts]
    engine.ingest([(text, source) for text in texts], progress=progress)
    return n_tokens


def _forget(engine: Engine, name: str, texts: Collection[str], own: Collection[str]) -> int:
    """Forget that passages came from a document, delete the KV of those that `_left` returns, and return its bytes."""
    alone = _left(engine, name, texts, own)
    return engine.forget(alone) if alone else 0


def _left(engine: Engine, name: str, texts: Collection[str], own: Collection[str]) -> list[str]:
    """Forget that passages came from a document, and return those of its `own` that no other source has.

    A passage that was found by a search and asked about is the document's as well, by the source that the search gave.
    """
    numbered = re.compile(rf"{re.escape(name[:_NAME_CHARS])} #[0-9]+")

    def is_left(source: str) -> bool:
        return source == name or numbered.fullmatch(source) is not None

    shared = leave_source(engine.catalog.strict, engine.digest, texts, is_left)
    return [text for text in own if text not in shared]


def _hit(document: StoredDocument, at: int, score: float) -> dict[str, Any]:
    source = f"{document.name[:_NAME_CHARS]} #{at + 1}"
    place = {"document": document.id, "name": document.name, "number": at + 1, "source": source}
    return {"object": "ragfuse.passage", **place, "text": document.passages[at], "score": round(score, 4)}
