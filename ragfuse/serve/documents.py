"""Documents that a tenant sends: split into passages, encoded in the background, and searched by
their embeddings.

A document that is ready is in the file of `DocumentRecords`, so that it is there after a restart
and for other servers over the same folder; the KV of its passages is in the store, with its name as
their source. With a document goes the KV of the passages that no other source has, also of what a
server that ended had not finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from ragfuse.engine.engine import Engine
from ragfuse.errors import InputError
from ragfuse.serve.document_records import StoredDocument
from ragfuse.serve.keys import APITenant
from ragfuse.serve.refusals import APIError, api_error_of
from ragfuse.serve.service import Service
from ragfuse.serve.stored import freed
from ragfuse.store.deletion import leave_source
from ragfuse.text.file_texts import split_text
from ragfuse.types.texts import whole_text

MAX_LISTED = 100
"""Most documents in a tenant's list."""
MAX_DOCUMENT_CHARS = 400_000
"""Most characters of a document."""
BATCH_PASSAGES = 4
"""Passages that are encoded in one turn; between two turns other requests are answered."""
BUSY_S = 2.0
"""Seconds after which a turn is asked for again where the queue was full."""


class TenantDocuments:
    """The documents of one tenant, encoded one after the other.

    Those in the file are read from it whenever they are asked for, so that they are what another
    server has made of them; those that are waiting or failed are held here.

    Args:
        service: The service.
        tenant: The tenant.
    """

    def __init__(self, service: Service, tenant: APITenant) -> None:
        self._service, self._tenant = service, tenant
        self._saved: dict[str, StoredDocument] = {}
        self._held: dict[str, StoredDocument] = {}
        self._turns, self._tasks = asyncio.Lock(), set[asyncio.Task[None]]()

    def all(self) -> dict[str, StoredDocument]:
        """Return all documents by their ids. It may block."""
        records, known, salt = self._service.documents, self._saved, self._tenant.salt
        read = {id: known.get(id) or records.read(salt, id) for id in records.ids(salt)}
        self._saved = {id: found for id, found in read.items() if found is not None}
        return {**self._saved, **self._held}

    def get(self, id: str) -> StoredDocument:
        """Return a document; APIError (404) where there is none. It may block."""
        found = self.all().get(id)
        if found is None:
            raise APIError(
                404,
                f"There is no document '{id:.80}' here. List them at /v1/ragfuse/documents.",
                "not_found",
            )
        return found

    async def add(self, document: StoredDocument, read: Callable[[], str]) -> None:
        """Add a document, whose text `read` returns, and encode it. Once it is ready, it replaces
        one of the same name.

        Raises:
            APIError: There are too many documents (400).
        """
        there = await asyncio.to_thread(self.all)
        n_others = sum(each.name != document.name for each in there.values())
        if n_others >= MAX_LISTED:
            raise APIError(
                400,
                f"There are {n_others} documents already, of at most {MAX_LISTED}. Delete one"
                " first.",
                "many",
            )
        self._held[document.id] = document
        task = asyncio.get_running_loop().create_task(self._encode(document, read))
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    def remove(self, engine: Engine, id: str) -> dict[str, Any]:
        """Delete a document and the KV that no other source has; return what that freed (`freed`).
        It may block.

        Raises:
            APIError: There is no such document (404), or KV may still be stored (503); the document
                is still listed.
        """
        document, done = self.get(id), {"nbytes": 0, "tiers": {}}
        if document.status in ("ready", "failed"):
            done = freed(engine, _left(engine, document.name, document.passages))
            self._service.documents.delete(self._tenant.salt, id)
        else:
            document.is_deleted = True  # what encodes it deletes its KV
        self._held.pop(id, None)
        return done

    def search(self, query: str, top_k: int, ids: Sequence[str] | None) -> list[dict[str, Any]]:
        """Return the passages that are closest to a query, closest first; each text once. It may
        block.
        """
        chosen = list(self.all().values()) if ids is None else [self.get(id) for id in ids]
        found = [(each, at) for each in chosen for at in range(len(each.vectors))]
        if not found:
            return []
        scores = (
            np.stack([each.vectors[at] for each, at in found])
            @ self._service.embedder.embed([query])[0]
        )
        best = dict[str, dict[str, Any]]()  # by text, as other documents may be copies
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

    # inside

    async def _encode(self, document: StoredDocument, read: Callable[[], str]) -> None:
        async with self._turns:
            try:
                await self._encode_now(document, read)
            except Exception as error:
                document.status, document.error = "failed", api_error_of(error).message

    async def _encode_now(self, document: StoredDocument, read: Callable[[], str]) -> None:
        name, vectors, document.status = document.name, list[Any](), "reading"
        text = whole_text(await asyncio.to_thread(read), f"'{name}'")
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
        there = await asyncio.to_thread(self.all)
        if not document.is_deleted:
            ready = document.model_copy(update={"status": "ready"})
            await asyncio.to_thread(records.add, salt, ready, np.stack(vectors))
        if document.is_deleted:
            await asyncio.to_thread(records.delete, salt, document.id)
            left = set(passages)
        else:
            replaced = [id for id, each in there.items() if each.name == name]
            for id in replaced:  # it is in the file, and those before it are gone
                self._held.pop(id, None)
            left = {text for id in replaced for text in there[id].passages}.difference(passages)
        if left:
            await self._turn(lambda engine: engine.forget(_left(engine, name, left)))

    def _embedded(
        self, document: StoredDocument, texts: Sequence[str], engine: Engine
    ) -> list[Any]:
        """Encode passages unless they are stored, and return their vectors."""
        document.nbytes += engine.ingest([(text, document.name) for text in texts]).nbytes
        return list(self._service.embedder.embed(texts))

    async def _turn(self, do: Callable[[Engine], Any]) -> Any:
        """Return the result of `do`, run when its turn in the request queue has come."""
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
        raise InputError("The document has no text; leave it out, or run OCR on its pages first.")
    return list(dict.fromkeys(found))


def _left(engine: Engine, name: str, texts: Collection[str]) -> list[str]:
    """Forget that passages came from a document, and return those that no other source has.

    A passage that was found by a search and asked about is the document's as well, by the source
    that the search gave.
    """
    numbered = f"{name} #"
    shared = leave_source(
        engine.catalog.strict,
        engine.digest,
        texts,
        lambda source: source == name or source.startswith(numbered),
    )
    return [text for text in texts if text not in shared]
