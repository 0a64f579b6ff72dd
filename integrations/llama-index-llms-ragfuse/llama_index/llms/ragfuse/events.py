"""A listener to what retrievers return, so that an LLM knows the chunks of its prompt without precomputing them.

LlamaIndex hands it every span of the process: it is registered once, when the LLM is first imported.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple
from weakref import ref

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

MAX_NODES = 64
"""Nodes kept of one context; a query keeps four times as many."""
MAX_CHARS = 4 << 20
"""Characters of text kept of one context or query."""
MAX_QUERIES = 1024
MAX_AGE_S = 3600.0
"""A query that is older, or that so many have begun after, is given up: its end may never come."""


class Text(NamedTuple):
    """A node as synthesizers put it into a prompt, where it is from, and its text alone."""

    text: str
    source: str
    bare: str


class Texts:
    """Texts that were retrieved, each once, the newest first; the oldest make room."""

    def __init__(self, limit: int = MAX_NODES, texts: Sequence[Text] = ()) -> None:
        self._limit = limit
        self.all: tuple[Text, ...] = tuple(texts)

    def add(self, texts: Iterable[Text]) -> None:
        """Put these before the others."""
        kept: dict[str, Text] = {}
        room = MAX_CHARS
        for each in (*texts, *self.all):
            if each.text not in kept and len(each.text) <= room and len(kept) < self._limit:
                kept[each.text] = each
                room -= len(each.text)
        self.all = tuple(kept.values())


class Here(Texts):
    """What was retrieved by spans that ended in one task, or in one thread outside of tasks."""

    def __init__(self, owner: object, texts: Sequence[Text] = ()) -> None:
        super().__init__(MAX_NODES, texts)
        self._owner = ref(owner)

    @classmethod
    def now(cls) -> Here:
        """That of the running task or thread; a new one knows what the context knew that it began in."""
        owner, found = _owner(), _HERE.get()
        if found is None or found._owner() is not owner:
            found = cls(owner, found.all if found else ())
            _HERE.set(found)
        return found


_HERE: ContextVar[Here | None] = ContextVar("ragfuse_llama_index_here", default=None)


@dataclass(eq=False)
class Query:
    """A span whose parent is not open, and all below it."""

    id: str
    here: Here
    began: float = field(default_factory=time.monotonic)
    open: set[str] = field(default_factory=set)
    texts: Texts = field(default_factory=lambda: Texts(4 * MAX_NODES))
    told: bool = True
    """Whether an LLM was asked since the last text was heard."""


class Queries:
    """The nodes that were met in each query: what retrievers and postprocessors return, what synthesizers are given.

    They are dropped when its last span ends. Those that no LLM was asked about are kept for the task or thread that
    called it: it may put them into a prompt by hand.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roots: dict[str, Query] = {}
        self._spans: dict[str, Query] = {}

    def begin(self, span: str, parent: str | None, given: Iterable[Any]) -> None:
        """Note a span and the nodes that it was given."""
        texts = [text for value in given for text in _texts(value)]
        with self._lock:
            query = self._spans.get(parent) if parent else None
            if query is None:
                query = self._roots[span] = Query(span, Here.now())
                self._give_up()
            self._spans[span] = query
            query.open.add(span)
            _hear(query, texts)

    def hear(self, span: str | None, value: Any) -> None:
        """Note nodes that were met in a span, or outside of any."""
        texts = _texts(value)
        with self._lock:
            query = self._spans.get(span) if span else None
            if query is None:
                Here.now().add(texts)
            else:
                _hear(query, texts)

    def end(self, span: str, result: Any = None) -> None:
        """Note the end of a span and the nodes that it returned."""
        texts = _texts(result)
        with self._lock:
            query = self._spans.pop(span, None)
            if query is None:
                return
            _hear(query, texts)
            if isinstance(result, AsyncStreamingResponse | StreamingResponse):
                query.told = False  # its LLM may be asked only when it is read
            query.open.discard(span)
            if not query.open:  # a span may go on behind its parent, as where a stream is read
                del self._roots[query.id]
                if not query.told:
                    query.here.add(query.texts.all)

    def known(self, span: str | None) -> tuple[Text, ...]:
        """What was met in a span's query, the newest first."""
        with self._lock:
            query = self._spans.get(span) if span else None
            if query is None:
                return ()
            query.told = True
            return query.texts.all

    def _give_up(self) -> None:
        """Drop queries that are too many or too old, but for the newest."""
        while len(self._roots) > 1:
            oldest = next(iter(self._roots.values()))
            if len(self._roots) <= MAX_QUERIES and oldest.began >= time.monotonic() - MAX_AGE_S:
                return
            del self._roots[oldest.id]
            for span in oldest.open:
                del self._spans[span]


QUERIES = Queries()


class RetrievalSpans(BaseSpanHandler[BaseSpan]):
    """Tells of spans; keeps none."""

    @classmethod
    def class_name(cls) -> str:
        """Its name."""
        return "RagFuseRetrievalSpans"

    def new_span(
        self, id_: str, bound_args: inspect.BoundArguments, parent_span_id: str | None = None, **kwargs: Any
    ) -> None:
        """Tell of one that begins."""
        QUERIES.begin(id_, parent_span_id, bound_args.arguments.values())

    def prepare_to_exit_span(self, id_: str, result: Any = None, **kwargs: Any) -> None:
        """Tell of one that ends."""
        QUERIES.end(id_, result)

    def prepare_to_drop_span(self, id_: str, **kwargs: Any) -> None:
        """Tell of one that fails."""
        QUERIES.end(id_)


class RetrievalEvents(BaseEventHandler):
    """Tells of nodes that were retrieved or ranked anew."""

    @classmethod
    def class_name(cls) -> str:
        """Its name."""
        return "RagFuseRetrievalEvents"

    def handle(self, event: Any, **kwargs: Any) -> None:
        """Tell of an event's nodes."""
        if isinstance(event, RetrievalEndEvent | ReRankEndEvent):
            QUERIES.hear(event.span_id, event.nodes)


get_dispatcher().add_span_handler(RetrievalSpans())
get_dispatcher().add_event_handler(RetrievalEvents())


def heard_for(prompt: str | Sequence[ChatMessage]) -> tuple[tuple[str, str], ...]:
    """(text, source) of what was retrieved in the running query or, before it, in the same task or thread.

    The text is what of a node stands in the prompt: one that is written by hand may leave out its metadata.
    """
    here = _HERE.get()
    found = (*QUERIES.known(active_span_id.get()), *(here.all if here else ()))
    said = _said(prompt) if found else ""
    texts: dict[str, str] = {}
    for each in found:
        texts.setdefault(next((form for form in _forms(each) if form in said), each.text), each.source)
    return tuple(texts.items())


def _said(prompt: str | Sequence[ChatMessage]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(each.content or "" for each in prompt)


def _forms(text: Text) -> Iterator[str]:
    """How a node may stand in a prompt: with its metadata or without."""
    for form in filter(None, (text.text, text.bare)):
        yield form
        # The response mode simple_summarize fills in a list, which is printed: "['First line.\\nSecond line.']".
        printed = repr(f'"{form}')[2:-1]
        yield printed
        yield printed.replace("\\'", "'")


def _hear(query: Query, texts: Sequence[Text]) -> None:
    if texts and any(text not in query.texts.all for text in texts):
        query.told = False
    if texts:
        query.texts.add(texts)


def _texts(value: Any) -> list[Text]:
    """The nodes in a list, as synthesizers put them into a prompt."""
    if not (isinstance(value, list | tuple) and value and isinstance(value[0], NodeWithScore)):
        return []
    nodes = [each.node for each in islice(value, 4 * MAX_NODES) if isinstance(each, NodeWithScore)]
    return [Text(text, source_of(node), node.get_content().strip()) for node in nodes if (text := text_of(node))]


def _owner() -> object:
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no event loop runs in this thread
        return threading.current_thread()
