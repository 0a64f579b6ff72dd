"""A tracer that records the documents in a pipeline's run, so that they are recognised in prompts
without indexing.

Haystack has one tracer a process. This one stands around it: every span goes on to the tracer that
was there, and what passes through is unchanged. It is put in place when a chat generator is made,
and again when one is warmed up, in case another tracer was enabled between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

from haystack import tracing
from haystack.dataclasses import ChatMessage
from haystack.tracing import Span, Tracer
from haystack.tracing.tracer import NullTracer
from haystack_integrations.components.generators.ragfuse.messages import DOCUMENTS

from ragfuse import RetrievalRuns

RUNS = RetrievalRuns("haystack")
"""The documents of each running pipeline: inputs and outputs of its components."""
_ACTIVE: ContextVar[int] = ContextVar("ragfuse_haystack_span", default=0)
_NUMBERS = count(1)


class RetrievalSpan(Span):
    """A span that records the documents in its content, and hands all on to the span of the tracer
    around it.

    Args:
        id: Its number in this process.
        span: The other tracer's span.
    """

    def __init__(self, id: int, span: Span) -> None:
        self.id, self.inner = id, span

    def set_tag(self, key: str, value: Any) -> None:
        """Hand on a tag."""
        self.inner.set_tag(key, value)

    def set_tags(self, tags: dict[str, Any]) -> None:
        """Hand on several tags."""
        self.inner.set_tags(tags)

    def set_content_tag(self, key: str, value: Any) -> None:
        """Record the documents in an input or output, and hand it on; the other span decides
        whether to keep it.
        """
        RUNS.record(self.id, DOCUMENTS(value))
        self.inner.set_content_tag(key, value)

    def raw_span(self) -> Any:
        """Return what the other tracer calls its span."""
        return self.inner.raw_span()

    def get_correlation_data_for_logs(self) -> dict[str, Any]:
        """Return what the other span adds to log lines."""
        return self.inner.get_correlation_data_for_logs()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the other tracer's spans have."""
        return _handed_on(self, "inner", name)


class RetrievalTracer(Tracer):
    """A tracer that opens every span at another tracer, and records the run that it belongs to.

    Args:
        around: The other tracer.
    """

    def __init__(self, around: Tracer) -> None:
        self.around = around

    @contextmanager
    def trace(
        self,
        operation_name: str,
        tags: dict[str, Any] | None = None,
        parent_span: Span | None = None,
    ) -> Iterator[Span]:
        """Open a span inside its parent, or else inside the one that is open in this task or
        thread.
        """
        id, outer = next(_NUMBERS), _ACTIVE.get()
        parent, theirs = outer, parent_span
        if isinstance(parent_span, RetrievalSpan):
            parent, theirs = parent_span.id, parent_span.inner
        RUNS.begin(id, parent or None)
        _ACTIVE.set(id)
        try:
            with self.around.trace(operation_name, tags=tags, parent_span=theirs) as span:
                yield RetrievalSpan(id, span)
        finally:
            # Not by a token: the end of an abandoned async generator may come in another context.
            _ACTIVE.set(outer)
            RUNS.end(id)

    def current_span(self) -> Span | None:
        """Return the other tracer's current span."""
        return self.around.current_span()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the other tracer has."""
        return _handed_on(self, "around", name)


class UntracedRetrievalTracer(RetrievalTracer, NullTracer):
    """A `RetrievalTracer` where tracing is disabled; for Haystack it still is."""


def listen() -> None:
    """Put a `RetrievalTracer` around the tracer of this process, unless there is one already."""
    around = tracing.tracer.actual_tracer
    if not isinstance(around, RetrievalTracer):
        kind = UntracedRetrievalTracer if isinstance(around, NullTracer) else RetrievalTracer
        tracing.tracer.actual_tracer = kind(around)


def retrieved_for(prompt: Sequence[ChatMessage] | str) -> tuple[tuple[str, str], ...]:
    """Return (text, source) of what was retrieved in the running pipeline or, before it, in this
    task or thread.
    """
    return RUNS.retrieved((_ACTIVE.get() or None,), lambda: _prompt_text(prompt))


def _handed_on(own: object, other: str, name: str) -> Any:
    """Return an attribute of the object that `own` stands around; while `own` is copied it has none
    yet.
    """
    if other not in vars(own):
        raise AttributeError(name)
    return getattr(vars(own)[other], name)


def _prompt_text(prompt: Sequence[ChatMessage] | str) -> str:
    if isinstance(prompt, str):
        return prompt
    results = (result for message in prompt for result in message.tool_call_results)
    texts = [
        *(text for message in prompt for text in message.texts),
        *(str(result.result) for result in results),
    ]
    return "\n".join(texts)
