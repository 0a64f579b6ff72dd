"""Encode nodes before questions are asked, and delete the stored KV of removed nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import ConfigDict, Field
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.ragfuse.base import RagFuseLLM
from llama_index.llms.ragfuse.convert import text_of

from ragfuse import Ingested, InputError
from ragfuse.adapters import Progress, shown
from ragfuse.types.arguments import checks_arguments


@checks_arguments
class KVPrecompute(TransformComponent):
    """The final step of an ingestion pipeline, which encodes nodes and stores the nodes' KV.

    Put this step after the splitter. A pipeline with a cache skips this step for known nodes, so
    call `ensure(nodes)` if KV may have been deleted from the store. `forget(nodes)` deletes the KV
    of removed or changed nodes.

    Args:
        llm: The LLM that will answer.
        show_progress: True to show a progress bar if stderr is a terminal.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    llm: RagFuseLLM = Field(exclude=True)
    show_progress: bool = Field(
        default=False, exclude=True, description="Show a progress bar if stderr is a terminal."
    )

    def __init__(self, llm: RagFuseLLM, **data: Any) -> None:
        super().__init__(llm=llm, **data)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in serialised pipelines."""
        return "KVPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the fields and a digest of model, dtype and tenant, for a pipeline's cache key."""
        return {**super().to_dict(**kwargs), "model": self.llm.get_engine().digest}

    def ensure(self, nodes: Sequence[BaseNode], progress: Progress = None) -> Ingested:
        """Encode the nodes whose KV is not stored yet. Nodes without text are skipped.

        Args:
            nodes: The nodes.
            progress: True to show a progress bar if stderr is a terminal. A callable is called
                after every node.
        """
        texts = [found for node in nodes if (found := text_of(node))[0]]
        with shown(progress or self.show_progress, len(texts), "Encoding nodes") as report:
            return self.llm.get_engine().ingest(texts, progress=report)

    def forget(self, nodes: Sequence[BaseNode]) -> int:
        """Delete the stored KV of nodes, and return the number of bytes freed."""
        return self.llm.get_engine().forget([text for text, _ in map(text_of, nodes) if text])

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Encode the nodes and return them unchanged."""
        self.ensure(nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Encode the nodes in a thread and return them unchanged."""
        return await asyncio.to_thread(self.__call__, nodes)

    def __getstate__(self) -> dict[str, Any]:
        """Raise InputError, because this step cannot be pickled."""
        raise InputError(
            "KVPrecompute cannot run in worker processes, because each process would load the"
            " model. Run the pipeline with num_workers=None; or remove this step, and call"
            " KVPrecompute(llm).ensure(nodes) after the pipeline."
        )
