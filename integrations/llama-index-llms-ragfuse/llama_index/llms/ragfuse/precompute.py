"""Encodes nodes into the chunk store, as the text that they will be in a prompt, and removes KV of deleted nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.llms.ragfuse.base import RagFuseLLM
from llama_index.llms.ragfuse.convert import source_of, text_of
from llama_index.llms.ragfuse.ledger import Keep, Ledger
from tqdm.auto import tqdm

from ragfuse import Ingested, InputError
from ragfuse.types.arguments import checks_arguments
from ragfuse.types.whole_text import whole_text


@checks_arguments
class KVPrecompute(TransformComponent):
    """Encodes nodes ahead of questions, as the last step of an ingestion pipeline, after the splitter.

    A pipeline with a cache skips its steps for nodes that it has seen; call `ensure(nodes)` if the store may have been
    emptied since. `collect(docstore)` deletes the KV of nodes that were removed or changed.

    Args:
        llm: The LLM that will answer.
        collection: Name of the documents of one docstore; docstores that share a chunk store need different names.
        show_progress: Show a bar if stderr is a terminal.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    llm: RagFuseLLM = Field(exclude=True)
    collection: str = Field(default="default", description="Name of the documents of one docstore.")
    show_progress: bool = Field(default=False, exclude=True, description="Show a bar if stderr is a terminal.")

    _ledger: Ledger | None = PrivateAttr(default=None)

    def __init__(self, llm: RagFuseLLM, **data: Any) -> None:
        super().__init__(llm=llm, **data)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in serialised pipelines."""
        return "KVPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the key for a pipeline's cache: it changes with model, dtype and tenant, and when KV was deleted."""
        model = self.llm.get_engine().digest
        collected = self.ledger.collected(model, self.collection)
        return {**super().to_dict(**kwargs), "model": model, "collected": collected}

    @property
    def ledger(self) -> Ledger:
        """The record of each document's texts, as seen by this step and others on the same store."""
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
        """Encode the nodes that are not stored yet.

        Args:
            nodes: The nodes; those without text are skipped.
            progress: Called after every node with the totals so far.
            show_progress: Show a bar if stderr is a terminal; None: the field of that name.
        """
        engine, encodable = self.llm.get_engine(), [node for node in nodes if text_of(node)]
        shown = self.show_progress if show_progress is None else show_progress
        bar = tqdm(encodable, desc="Encoding nodes", unit="node", disable=None if shown else True)  # None: on terminals
        done = engine.ingest(((text_of(node), source_of(node)) for node in bar), progress=progress)
        self.ledger.note(engine.digest, self.collection, ((*_version(node), text_of(node)) for node in encodable))
        return done

    def collect(self, alive: BaseDocumentStore | Iterable[BaseNode], none_left: bool = False) -> int:
        """Delete the KV of texts that no document contains any more; return the freed bytes.

        Texts that another document, version or collection uses stay, and so do those that this step never encoded.

        Args:
            alive: The docstore after its documents were updated or deleted, or all nodes that still exist.
            none_left: Allow that no document is left at all.

        Raises:
            InputError: No document is left and `none_left` is false: the docstore may not have been loaded.
        """
        alive = alive if isinstance(alive, BaseDocumentStore) else list(alive)
        if not (none_left or (alive.docs if isinstance(alive, BaseDocumentStore) else alive)):
            raise InputError(
                f"No document is left, so all KV of the collection '{self.collection}' would be deleted. If you want "
                "that, call collect(..., none_left=True); otherwise pass nodes, or a docstore that has some."
            )
        engine = self.llm.get_engine()
        keep = _in_docstore(alive) if isinstance(alive, BaseDocumentStore) else _among(alive)
        return self.ledger.collect(engine.digest, self.collection, keep, engine.forget)

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Encode the nodes and return them unchanged."""
        self.ensure(nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Encode the nodes in a thread and return them unchanged."""
        return await asyncio.to_thread(self.__call__, nodes)

    def __getstate__(self) -> dict[str, Any]:
        """Raise InputError: the step cannot be sent to another process."""
        raise InputError(
            "KVPrecompute cannot run in other processes, as each would load the model. Run the pipeline with "
            "num_workers=None, or without this step and then KVPrecompute(llm).ensure(nodes)."
        )


def _version(node: BaseNode) -> tuple[str, str]:
    """Return id and hash of a node's document, or of the node itself if it has no document."""
    source = node.source_node
    return (node.node_id, node.hash) if source is None else (source.node_id, source.hash or "")


def _in_docstore(docstore: BaseDocumentStore) -> Keep:
    """Keep the texts of each document's version in the docstore, and of the newest, whose hash may be unknown."""
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
    texts = {whole_text(text_of(node)) for node in nodes}
    return lambda document, version, newest, text: text in texts
