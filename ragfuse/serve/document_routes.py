"""Routes that take documents of the client's tenant, say how far they are, search and delete them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from ragfuse.serve.body import BodyRoute
from ragfuse.serve.documents import DocumentLists, StoredDocument, TenantDocuments, checked, pdf_of, suffix_of
from ragfuse.serve.guard import unless_disconnected
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.schema import RequestBody
from ragfuse.serve.service import DOCUMENTS_PATH, Service

MAX_NAME = 256
"""Most characters of a document's name."""
MAX_QUERY_CHARS = 8192
"""Most characters of a search."""
MAX_PASSAGES = 50
"""Most passages that a search returns."""


class DocumentRequest(RequestBody):
    """A document to encode: its text, or a PDF in base64. It replaces a document of the same name.

    Its type, by `media_type` or the end of its name, says how the text is read: HTML without marks and scripts, CSV as
    "column: value".
    """

    name: str = Field(min_length=1, max_length=MAX_NAME)
    text: str | None = None
    pdf: str | None = None
    media_type: str | None = Field(default=None, max_length=128)
    """The type of the text: text/html, text/csv ..., or text/plain to have it taken as it is; default: by the name."""


class SearchRequest(RequestBody):
    """A search among the client's documents."""

    query: str = Field(min_length=1, max_length=MAX_QUERY_CHARS)
    top_k: int | None = Field(default=None, ge=1, le=MAX_PASSAGES)
    """Most passages; default: the setting `top_k`."""
    documents: Annotated[list[str], Field(fail_fast=True)] | None = Field(default=None, max_length=1000)
    """Ids of the documents to search in; default: all."""


def document_routes(service: Service) -> APIRouter:
    """Return the routes of documents."""
    routes, lists = APIRouter(prefix=DOCUMENTS_PATH, route_class=BodyRoute), DocumentLists(service)

    async def looked_at(request: Request) -> TenantDocuments:
        """Return the client's documents, with what the store has of them now unless one is being encoded."""
        tenant = tenant_of(request)
        documents = await lists.of(tenant)
        if not documents.is_encoding:
            await unless_disconnected(request.receive, service.lookup(tenant, documents.look))
        return documents

    @routes.post("")
    async def add(request: Request, body: DocumentRequest) -> dict[str, Any]:
        """Take a document and encode its passages in the background; ask for it again to see how far it is."""
        if (body.text is None) is (body.pdf is None):
            raise APIError(400, "Give either text or pdf, found both or neither.", "unusable", "text")
        text = checked(body.text) if body.text is not None else ""
        pdf = pdf_of(body.pdf) if body.pdf is not None else b""
        document = StoredDocument(body.name, text, pdf, suffix_of(body.name, body.media_type))
        (await lists.of(tenant_of(request))).add(document)
        return document.as_dict()

    @routes.get("")
    async def ls(request: Request) -> dict[str, Any]:
        """List the documents of the client's tenant."""
        documents = await looked_at(request)
        return {"object": "list", "data": [each.as_dict() for each in documents.all.values()]}

    @routes.post("/search")
    async def search(request: Request, body: SearchRequest) -> dict[str, Any]:
        """Return the passages that are closest to a query, by the embedder of the settings."""
        tenant, top_k = tenant_of(request), body.top_k or min(service.settings.top_k, MAX_PASSAGES)
        documents = await lists.of(tenant)
        work = service.lookup(tenant, lambda _: documents.search(body.query, top_k, body.documents))
        return {"object": "list", "data": await unless_disconnected(request.receive, work)}

    @routes.get("/{id}")
    async def show(request: Request, id: str) -> dict[str, Any]:
        """Show how far a document is."""
        return (await looked_at(request)).get(id).as_dict()

    @routes.delete("/{id}")
    async def remove(request: Request, id: str) -> dict[str, Any]:
        """Delete a document and the KV that was encoded for it; what was stored before, or another one has, stays."""
        tenant = tenant_of(request)
        work = service.lookup(tenant, (await lists.of(tenant)).remove(id))
        return {
            "object": "ragfuse.document",
            "id": id,
            "deleted": True,
            **await unless_disconnected(request.receive, work),
        }

    return routes
