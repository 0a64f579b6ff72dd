"""Handlers that record retrieved nodes, so that they are recognised in prompts without precomputing them.

They are registered for all LlamaIndex spans and events of the process when the LLM is first imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import islice
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.schema import NodeWithScore
from llama_index.llms.ragfuse.convert import source_of, text_of

from ragfuse import RetrievalRuns

MAX_NODES = 256
"""The most nodes that are taken from one list."""

QUERIES = RetrievalRuns("llama_index", outlasts=True)
"""The nodes of each open query: results of retrievers and postprocessors, inputs of synthesizers."""


class RetrievalSpans(BaseSpanHandler[BaseSpan]):
    """A span handler that records the nodes in the inputs and results of spans."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the handler."""
        return "RagFuseRetrievalSpans"

    def new_span(
        self, id_: str, bound_args: inspect.BoundArguments, parent_span_id: str | None = None, **kwargs: Any
    ) -> None:
        """Record the start of a span and the nodes in its arguments."""
        texts = [text for value in bound_args.arguments.values() for text in _texts(value)]
        QUERIES.begin(id_, parent_span_id, texts)

    def prepare_to_exit_span(self, id_: str, result: Any = None, **kwargs: Any) -> None:
        """Record the end of a span and its nodes; a streamed response may call the LLM only when it is read."""
        QUERIES.end(id_, _texts(result), unread=isinstance(result, AsyncStreamingResponse | StreamingResponse))

    def prepare_to_drop_span(self, id_: str, **kwargs: Any) -> None:
        """Record the end of a span that failed."""
        QUERIES.end(id_)


class RetrievalEvents(BaseEventHandler):
    """An event handler that records retrieved and reranked nodes."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the handler."""
        return "RagFuseRetrievalEvents"

    def handle(self, event: Any, **kwargs: Any) -> None:
        """Record the nodes of an event."""
        if isinstance(event, RetrievalEndEvent | ReRankEndEvent):
            QUERIES.record(event.span_id, _texts(event.nodes))


get_dispatcher().add_span_handler(RetrievalSpans())
get_dispatcher().add_event_handler(RetrievalEvents())


def retrieved_for(prompt: str | Sequence[ChatMessage]) -> tuple[tuple[str, str], ...]:
    """Return (text, source) of what was retrieved in the running query or, before it, in the same task or thread."""
    return QUERIES.retrieved((active_span_id.get(),), lambda: _prompt_text(prompt))


def _prompt_text(prompt: str | Sequence[ChatMessage]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(each.content or "" for each in prompt)


def _texts(value: Any) -> list[tuple[str, str, str]]:
    """Return (text as in a prompt, source, text without metadata) of the nodes in a list."""
    if not (isinstance(value, list | tuple) and value and isinstance(value[0], NodeWithScore)):
        return []
    nodes = [each.node for each in islice(value, MAX_NODES) if isinstance(each, NodeWithScore)]
    return [(text, source_of(node), node.get_content().strip()) for node in nodes if (text := text_of(node))]
