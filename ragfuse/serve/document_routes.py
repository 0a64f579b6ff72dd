"""Routes that take documents of the client's tenant, say how far they are, search and
delete them.
"""

from __future__ import annotations

from asyncio import to_thread
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Base64Bytes, Field

from ragfuse.serve.body import BodyRoute
from ragfuse.serve.document_records import StoredDocument
from ragfuse.serve.documents import MAX_DOCUMENT_CHARS, TenantDocuments
from ragfuse.serve.refusals import unusable
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.schema import RequestBody
from ragfuse.serve.service import Service
from ragfuse.serve.upload_text import PDF, text_of

MAX_NAME = 240
"""Most characters of a document's name, so that the numbered source of a passage is a title."""
MAX_QUERY_CHARS = 8192
"""Most characters of a search."""
MAX_PASSAGES = 50
"""Most passages that a search returns."""


class DocumentRequest(RequestBody):
    """A document to encode: its text, or a PDF in base64. It replaces a document of the same name.

    The end of its name says how the text is read: HTML without marks and scripts, CSV as "column:
        value".
    """

    name: str = Field(min_length=1, max_length=MAX_NAME)
    text: str | None = Field(default=None, max_length=MAX_DOCUMENT_CHARS)
    pdf: Annotated[Base64Bytes, Field(strict=False)] | None = None


class SearchRequest(RequestBody):
    """A search among the client's documents."""

    query: str = Field(min_length=1, max_length=MAX_QUERY_CHARS)
    top_k: int | None = Field(default=None, ge=1, le=MAX_PASSAGES)
    """Most passages; default: the setting `top_k`."""
    documents: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        default=None, max_length=1000
    )
    """Ids of the documents to search in; default: all."""


def document_routes(service: Service) -> APIRouter:
    """Return the routes of documents."""
    routes = APIRouter(prefix="/v1/ragfuse/documents", route_class=BodyRoute)
    lists = dict[str, TenantDocuments]()

    def documents_of(request: Request) -> TenantDocuments:
        tenant = tenant_of(request)
        return lists.setdefault(tenant.salt, TenantDocuments(service, tenant))

    @routes.post("")
    async def add(request: Request, body: DocumentRequest) -> dict[str, Any]:
        """Take a document and encode its passages in the background; ask for it again to see how
        far it is.
        """
        if (body.text is None) is (body.pdf is None):
            raise unusable("text", "Give either text or pdf, found both or neither.")
        suffix = PDF if body.pdf is not None else PurePosixPath(body.name).suffix.lower()
        data = (
            body.pdf
            if body.pdf is not None
            else (body.text or "").removeprefix("\ufeff").encode("utf-8", "surrogatepass")
        )
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
        """Return the passages that are closest to a query, by the embedder of the settings."""
        top_k = body.top_k or min(service.settings.top_k, MAX_PASSAGES)
        documents = documents_of(request)
        found = await service.lookup(
            request, lambda _: documents.search(body.query, top_k, body.documents)
        )
        return {"object": "list", "data": found}

    @routes.get("/{id}")
    async def show(request: Request, id: str) -> dict[str, Any]:
        """Show how far a document is."""
        return (await to_thread(documents_of(request).get, id)).as_dict()

    @routes.delete("/{id}")
    async def remove(request: Request, id: str) -> dict[str, Any]:
        """Delete a document and the KV of its passages that no other source has."""
        documents = documents_of(request)
        done = await service.lookup(request, lambda engine: documents.remove(engine, id))
        return {"object": "ragfuse.document", "id": id, "deleted": True, **done}

    return routes
