"""Handlers that record retrieved nodes, so that prompts reuse nodes without `KVPrecompute`.

Importing `RagFuseLLM` registers the handlers for all LlamaIndex spans and events in the process.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.llms.ragfuse.convert import NODES

from ragfuse import RetrievalRuns

QUERIES = RetrievalRuns("llama_index")
"""The nodes that occurred in each unfinished query."""


class RetrievalSpans(BaseSpanHandler[BaseSpan]):
    """A span handler that records the nodes in the arguments and results of spans."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the handler."""
        return "RagFuseRetrievalSpans"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        parent_span_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the start of a span and the nodes in the span's arguments."""
        QUERIES.begin(id_, parent_span_id, NODES(*bound_args.arguments.values()))

    def prepare_to_exit_span(self, id_: str, result: Any = None, **kwargs: Any) -> None:
        """Record the end of a span and the nodes in the span's result.

        If the result is a streamed response, reading the response may call the LLM.
        """
        unread = isinstance(result, AsyncStreamingResponse | StreamingResponse)
        QUERIES.end(id_, NODES(result), unread=unread)

    def prepare_to_drop_span(self, id_: str, **kwargs: Any) -> None:
        """Record the end of a failed span."""
        QUERIES.end(id_)


class RetrievalEvents(BaseEventHandler):
    """An event handler that records retrieved and reranked nodes."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the handler."""
        return "RagFuseRetrievalEvents"

    def handle(self, event: Any, **kwargs: Any) -> None:
        """Record the nodes of a retrieval or reranking event, and ignore all other events."""
        if isinstance(event, RetrievalEndEvent | ReRankEndEvent):
            QUERIES.record(event.span_id, NODES(event.nodes))


get_dispatcher().add_span_handler(RetrievalSpans())
get_dispatcher().add_event_handler(RetrievalEvents())


def retrieved_for(prompt: str | Sequence[ChatMessage]) -> tuple[tuple[str, str], ...]:
    """Return (text, source) of the retrieved nodes that a prompt contains."""

    def text() -> str:
        if isinstance(prompt, str):
            return prompt
        return "\n".join(each.content or "" for each in prompt)

    return QUERIES.retrieved((active_span_id.get(),), text)
