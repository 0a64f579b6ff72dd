"""Nodes into the store, as the texts that they will be in a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.ragfuse.base import RagFuseLLM
from llama_index.llms.ragfuse.convert import source_of, text_of

from ragfuse import Ingested


class KVPrecompute(TransformComponent):
    """Encodes nodes ahead of the questions: the last step of an ingestion pipeline, behind the splitter.

    A pipeline with a cache skips its steps for nodes that it has met before; call `ensure(nodes)` where the store may
    have been emptied since.
    """

    llm: RagFuseLLM = Field(exclude=True)

    def __init__(self, llm: RagFuseLLM, **data: Any) -> None:
        super().__init__(llm=llm, **data)

    @classmethod
    def class_name(cls) -> str:
        """Its name in serialised pipelines."""
        return "KVPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """What a pipeline's cache goes by: another model, dtype or tenant means other KV."""
        return {**super().to_dict(**kwargs), "model": self.llm.get_engine().digest}

    def ensure(self, nodes: Sequence[BaseNode], progress: Callable[[Ingested], None] | None = None) -> Ingested:
        """Encode and keep what is not kept yet; `progress` hears of every node."""
        texts = ((text_of(node), source_of(node)) for node in nodes)
        return self.llm.get_engine().ingest(texts, progress=progress)

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same nodes, whose KV is in the store now."""
        self.ensure(nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same in a thread of its own."""
        return await asyncio.to_thread(self.__call__, nodes)
