"""Documents uploaded by tenants: split, encoded in the background, and searched by embeddings.

A ready document is in `DocumentRecords`. The KV of the document's passages is in the store, with
the document's name as source. If a document is deleted, the KV of passages without another source
is deleted, too.
"""

from __future__ import annotations

import asyncio
from asyncio import to_thread
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Base64Bytes, Field

from ragfuse.engine.engine import Engine
from ragfuse.errors import InputError
from ragfuse.serve.guard import BodyRoute
from ragfuse.serve.keys import APITenant, tenant_of
from ragfuse.serve.records import StoredDocument
from ragfuse.serve.refusals import APIError, api_error_of, unusable
from ragfuse.serve.schema import RequestBody
from ragfuse.serve.service import Service
from ragfuse.serve.stored import freed
from ragfuse.serve.upload_text import PDF, text_of
from ragfuse.store.deletion import leave_source
from ragfuse.text.file_texts import split_text
from ragfuse.types.texts import whole_text

MAX_LISTED = 100
"""Maximum number of documents per tenant."""
MAX_DOCUMENT_CHARS = 400_000
BATCH_PASSAGES = 4
"""Number of passages encoded per turn in the request queue."""
BUSY_S = 2.0
"""Seconds before a full queue is tried again, if the queue's error has no `retry_s`."""


class TenantDocuments:
    """The documents of one tenant, encoded one after another.

    Other servers may add and delete ready documents, so the ids of ready documents are read from
    `DocumentRecords` at each call. Only this process knows documents that are waiting, that are
    being encoded, or that failed. Methods that are not coroutines may block.
    """

    def __init__(self, service: Service, tenant: APITenant) -> None:
        self._service, self._tenant = service, tenant
        self._saved: dict[str, StoredDocument] = {}
        self._held: dict[str, StoredDocument] = {}
        self._turns, self._tasks = asyncio.Lock(), set[asyncio.Task[None]]()

    def all(self) -> dict[str, StoredDocument]:
        """Return all documents by id: ready, pending and failed documents."""
        records, known, salt = self._service.documents, self._saved, self._tenant.salt
        read = {id: known.get(id) or records.read(salt, id) for id in records.ids(salt)}
        self._saved = {id: found for id, found in read.items() if found is not None}
        return {**self._saved, **self._held}

    def get(self, id: str) -> StoredDocument:
        """Return the document with an id; APIError (404) if no document has the id."""
        found = self.all().get(id)
        if found is None:
            raise APIError(
                404,
                f"There is no document '{id:.80}'. GET /v1/ragfuse/documents lists all documents.",
                "not_found",
            )
        return found

    async def add(self, document: StoredDocument, read: Callable[[], str]) -> None:
        """Encode a document in the background, then replace other documents of the same name.

        Args:
            document: The document, without passages.
            read: Returns the document's text. Called in a thread.

        Raises:
            APIError: There are too many documents (400).
        """
        there = await to_thread(self.all)
        n_others = sum(each.name != document.name for each in there.values())
        if n_others >= MAX_LISTED:
            raise APIError(
                400,
                f"There are {n_others} documents; the maximum is {MAX_LISTED}. Delete a document.",
                "many",
            )
        self._held[document.id] = document
        task = asyncio.create_task(self._encode(document, read))
        self._tasks.add(task)  # the event loop keeps no strong reference
        task.add_done_callback(self._tasks.discard)

    def remove(self, engine: Engine, id: str) -> dict[str, Any]:
        """Delete a document, and the KV of passages without another source.

        Returns:
            The bytes freed, in total and by tier. For a document that is not encoded yet, the KV is
            deleted later, and the result is 0 bytes.

        Raises:
            APIError: The document does not exist (404), or a tier failed (503). The failed tier may
                still store KV, and the document stays listed.
        """
        document, done = self.get(id), {"nbytes": 0, "tiers": {}}
        if document.status in ("ready", "failed"):
            done = freed(engine, _left(engine, document.name, document.passages))
            self._service.documents.delete(self._tenant.salt, id)
        else:
            document.is_deleted = True  # its encoding task then deletes its KV
        self._held.pop(id, None)
        return done

    def search(self, query: str, top_k: int, ids: Sequence[str] | None) -> list[dict[str, Any]]:
        """Return the `top_k` passages most similar to a query, best first, without duplicates."""
        chosen = list(self.all().values()) if ids is None else [self.get(id) for id in ids]
        found = [(each, at) for each in chosen for at in range(len(each.vectors))]
        if not found:
            return []
        scores = (
            np.stack([each.vectors[at] for each, at in found])
            @ self._service.embedder.embed([query])[0]
        )
        best = dict[str, dict[str, Any]]()  # by text, since documents may contain equal passages
        for place in np.argsort(-scores, kind="stable").tolist():
            document, at = found[place]
            text = document.passages[at]
            hit = {
                "object": "ragfuse.passage",
                "document": document.id,
                "name": document.name,
                "number": at + 1,
                "source": f"{document.name} #{at + 1}",
                "text": text,
                "score": round(float(scores[place]), 4),
            }
            best.setdefault(text.strip(), hit)
            if len(best) == top_k:
                break
        return list(best.values())

    # internal

    async def _encode(self, document: StoredDocument, read: Callable[[], str]) -> None:
        async with self._turns:
            try:
                await self._encode_now(document, read)
            except Exception as error:
                document.status, document.error = "failed", api_error_of(error).message

    async def _encode_now(self, document: StoredDocument, read: Callable[[], str]) -> None:
        name, vectors, document.status = document.name, list[Any](), "reading"
        text = whole_text(await to_thread(read), f"'{name}'")
        document.passages = passages = await self._turn(lambda engine: _split(engine, text))
        document.status = "encoding"
        for at in range(0, len(passages), BATCH_PASSAGES):
            if document.is_deleted:
                break
            texts = passages[at : at + BATCH_PASSAGES]
            vectors += await self._turn(partial(self._embedded, document, texts))
            document.vectors = vectors
            document.encoded += len(texts)
        records, salt = self._service.documents, self._tenant.salt
        there = await to_thread(self.all)
        if not document.is_deleted:
            ready = document.model_copy(update={"status": "ready"})
            await to_thread(records.add, salt, ready, np.stack(vectors))
        if document.is_deleted:
            await to_thread(records.delete, salt, document.id)
            left = set(passages)
        else:
            replaced = [id for id, each in there.items() if each.name == name]
            for id in replaced:  # `records.add` replaced them in the file
                self._held.pop(id, None)
            left = {text for id in replaced for text in there[id].passages}.difference(passages)
        if left:
            await self._turn(lambda engine: engine.forget(_left(engine, name, left)))

    def _embedded(
        self, document: StoredDocument, texts: Sequence[str], engine: Engine
    ) -> list[Any]:
        document.nbytes += engine.ingest([(text, document.name) for text in texts]).nbytes
        return list(self._service.embedder.embed(texts))

    async def _turn(self, do: Callable[[Engine], Any]) -> Any:
        """Call `do` in a turn of the request queue; retry if the queue is full or times out."""
        while True:
            try:
                return await self._service.work(self._tenant, lambda engine, _: do(engine))
            except TimeoutError:
                continue
            except APIError as error:
                if error.status != 429:
                    raise
                await asyncio.sleep(error.retry_s or BUSY_S)


def _split(engine: Engine, text: str) -> list[str]:
    found = split_text(text, engine.settings, engine.model.tokenizer)
    if not found:
        raise InputError(
            "The document has no text. If its pages are scanned, run OCR on the document first."
        )
    return list(dict.fromkeys(found))


def _left(engine: Engine, name: str, texts: Collection[str]) -> list[str]:
    """Remove a document from the sources of passages; return the passages without another source.

    If a question used a passage as a search result, the passage also has the source
    "NAME #NUMBER". This source is removed, too.
    """
    numbered = f"{name} #"
    shared = leave_source(
        engine.catalog.strict,
        engine.digest,
        texts,
        lambda source: source == name or source.startswith(numbered),
    )
    return [text for text in texts if text not in shared]


MAX_NAME = 240
"""Maximum characters of a document's name: "NAME #NUMBER" must fit into a title."""
MAX_QUERY_CHARS = 8192
MAX_PASSAGES = 50


class DocumentRequest(RequestBody):
    """A document to encode: text, or a PDF in base64. A document of the same name is replaced.

    The suffix of `name` determines how `text` is read. Tags are removed if the suffix is ".html".
    Each row becomes lines "column: value" if the suffix is ".csv".
    """

    name: str = Field(min_length=1, max_length=MAX_NAME)
    text: str | None = Field(default=None, max_length=MAX_DOCUMENT_CHARS)
    pdf: Annotated[Base64Bytes, Field(strict=False)] | None = None


class SearchRequest(RequestBody):
    """A search in the client's documents."""

    query: str = Field(min_length=1, max_length=MAX_QUERY_CHARS)
    top_k: int | None = Field(default=None, ge=1, le=MAX_PASSAGES)
    """Maximum number of passages. By default, the server's setting `top_k`."""
    documents: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        default=None, max_length=1000
    )
    """Ids of the documents to search. By default, all documents are searched."""


def document_routes(service: Service) -> APIRouter:
    """Return the routes that upload, list, search and delete documents."""
    routes = APIRouter(prefix="/v1/ragfuse/documents", route_class=BodyRoute)
    lists = dict[str, TenantDocuments]()

    def documents_of(request: Request) -> TenantDocuments:
        tenant = tenant_of(request)
        return lists.setdefault(tenant.salt, TenantDocuments(service, tenant))

    @routes.post("")
    async def add(request: Request, body: DocumentRequest) -> dict[str, Any]:
        """Encode a document in the background. GET the document's id to see the progress."""
        if (body.text is None) is (body.pdf is None):
            raise unusable("text", "Send exactly one of text and pdf.")
        if body.text is None:
            suffix, data = PDF, body.pdf or b""
        else:
            suffix = PurePosixPath(body.name).suffix.lower()
            data = body.text.removeprefix("\ufeff").encode()
        document = StoredDocument(name=body.name)
        read = partial(text_of, data, suffix, MAX_DOCUMENT_CHARS)
        await documents_of(request).add(document, read)
        return document.as_dict()

    @routes.get("")
    async def ls(request: Request) -> dict[str, Any]:
        """List the documents of the client's tenant."""
        found = await to_thread(documents_of(request).all)
        return {"object": "list", "data": [each.as_dict() for each in found.values()]}

    @routes.post("/search")
    async def search(request: Request, body: SearchRequest) -> dict[str, Any]:
        """Return the passages whose embeddings are most similar to the query's embedding."""
        top_k = body.top_k or min(service.settings.top_k, MAX_PASSAGES)
        documents = documents_of(request)
        found = await service.lookup(
            request, lambda _: documents.search(body.query, top_k, body.documents)
        )
        return {"object": "list", "data": found}

    @routes.get("/{id}")
    async def show(request: Request, id: str) -> dict[str, Any]:
        """Show a document and its progress."""
        return (await to_thread(documents_of(request).get, id)).as_dict()

    @routes.delete("/{id}")
    async def remove(request: Request, id: str) -> dict[str, Any]:
        """Delete a document, and the KV of its passages that have no other source."""
        documents = documents_of(request)
        done = await service.lookup(request, lambda engine: documents.remove(engine, id))
        return {"object": "ragfuse.document", "id": id, "deleted": True, **done}

    return routes
