"""Nodes into the store, as the texts that they will be in a prompt; and out of it, when no document has them more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.llms.ragfuse.base import RagFuseLLM
from llama_index.llms.ragfuse.convert import source_of, text_of
from llama_index.llms.ragfuse.ledger import Keep, Ledger
from tqdm.auto import tqdm

from ragfuse import Ingested, InputError


class KVPrecompute(TransformComponent):
    """Encodes nodes ahead of the questions: the last step of an ingestion pipeline, behind the splitter.

    A pipeline with a cache skips its steps for nodes that it has met before; call `ensure(nodes)` where the store may
    have been emptied since. `collect(docstore)` gives back the room of what documents lost since. `collection` names
    the documents that are kept in one docstore: give each docstore its own where several share a chunk store.
    """

    llm: RagFuseLLM = Field(exclude=True)
    collection: str = Field(default="default", description="Documents that one docstore keeps.")
    show_progress: bool = Field(default=False, exclude=True, description="Show a bar, where output is a terminal.")

    _ledger: Ledger | None = PrivateAttr(default=None)

    def __init__(self, llm: RagFuseLLM, **data: Any) -> None:
        super().__init__(llm=llm, **data)

    @classmethod
    def class_name(cls) -> str:
        """Its name in serialised pipelines."""
        return "KVPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """What a pipeline's cache goes by: another model, dtype or tenant means other KV, and some may be forgotten."""
        model = self.llm.get_engine().digest
        collected = self.ledger.collected(model, self.collection)
        return {**super().to_dict(**kwargs), "model": model, "collected": collected}

    @property
    def ledger(self) -> Ledger:
        """Which document has which texts, as far as this step or another on the same store has seen them."""
        if self._ledger is None:
            settings = self.llm.get_engine().settings
            self._ledger = Ledger(settings.store_path if settings.disk_bytes else None)
        return self._ledger

    def ensure(
        self,
        nodes: Sequence[BaseNode],
        progress: Callable[[Ingested], None] | None = None,
        show_progress: bool | None = None,
    ) -> Ingested:
        """Encode and keep what is not kept yet; `progress` hears of every node."""
        engine, meant = self.llm.get_engine(), [node for node in nodes if text_of(node)]
        shown = self.show_progress if show_progress is None else show_progress
        bar = tqdm(meant, desc="Encoding nodes", unit="node", disable=None if shown else True)  # None: on terminals
        done = engine.ingest(((text_of(node), source_of(node)) for node in bar), progress=progress)
        self.ledger.note(engine.digest, self.collection, ((*_version(node), text_of(node)) for node in meant))
        return done

    def collect(self, alive: BaseDocumentStore | Iterable[BaseNode], none_left: bool = False) -> int:
        """Forget the KV of what no document has any more; bytes that this freed.

        `alive` is the docstore of the pipeline or index after its documents were updated or deleted, or all nodes that
        there are. What another document, version or collection uses stays, and so does what never came through here.
        `none_left`: there may be none at all, else that is an InputError, as a docstore that was not loaded has none.
        """
        alive = alive if isinstance(alive, BaseDocumentStore) else list(alive)
        if not (none_left or (alive.docs if isinstance(alive, BaseDocumentStore) else alive)):
            raise InputError(
                f"No document is left, so all KV of the collection '{self.collection}' would go; wanted nodes, or a "
                "docstore that has some. Where that is meant: collect(..., none_left=True)."
            )
        engine = self.llm.get_engine()
        keep = _in_docstore(alive) if isinstance(alive, BaseDocumentStore) else _among(alive)
        return self.ledger.collect(engine.digest, self.collection, keep, engine.forget)

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same nodes, whose KV is in the store now."""
        self.ensure(nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same in a thread of its own."""
        return await asyncio.to_thread(self.__call__, nodes)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be sent to another process."""
        raise InputError(
            "KVPrecompute stays in its process: wanted a pipeline with num_workers=None, found one whose workers would "
            "each load the model. Run the pipeline without this step, then KVPrecompute(llm).ensure(nodes)."
        )


def _version(node: BaseNode) -> tuple[str, str]:
    """The document of a node and that one's hash; a node of no document stands for itself."""
    source = node.source_node
    return (node.node_id, node.hash) if source is None else (source.node_id, source.hash or "")


def _in_docstore(docstore: BaseDocumentStore) -> Keep:
    """Uses by a document's version of now; the newest one stays too, should the docstore not know its hash."""
    hashes: dict[str, str | None] = {}

    def keep(document: str, version: str, newest: bool, text: str) -> bool:
        if document not in hashes:
            hashes[document] = docstore.get_document_hash(document)
            if hashes[document] is None and docstore.get_ref_doc_info(document) is not None:
                hashes[document] = ""
        found = hashes[document]
        return found is not None and (newest or version == found)

    return keep


def _among(nodes: Iterable[BaseNode]) -> Keep:
    texts = {text_of(node) for node in nodes}
    return lambda document, version, newest, text: text in texts
