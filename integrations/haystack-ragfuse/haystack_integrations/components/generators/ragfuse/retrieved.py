"""A tracer that records retrieved documents, so that prompts reuse documents without indexing.

Haystack has one tracer per process. `RetrievalTracer` wraps that tracer and forwards every span
unchanged. `RetrievalTracer` is installed when a chat generator is created, and again on warm-up,
because another tracer may have been enabled in between.
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
"""The documents in inputs and outputs of components, by running pipeline."""
_ACTIVE: ContextVar[int] = ContextVar("ragfuse_haystack_span", default=0)
_NUMBERS = count(1)


class RetrievalSpan(Span):
    """A span that records documents and forwards all calls to the wrapped tracer's span.

    Args:
        id: The span's number in this process.
        span: The wrapped tracer's span.
    """

    def __init__(self, id: int, span: Span) -> None:
        self.id, self.inner = id, span

    def set_tag(self, key: str, value: Any) -> None:
        """Forward a tag."""
        self.inner.set_tag(key, value)

    def set_tags(self, tags: dict[str, Any]) -> None:
        """Forward several tags."""
        self.inner.set_tags(tags)

    def set_content_tag(self, key: str, value: Any) -> None:
        """Record the documents in `value`, then forward `value` to the wrapped span."""
        RUNS.record(self.id, DOCUMENTS(value))
        self.inner.set_content_tag(key, value)

    def raw_span(self) -> Any:
        """Return the wrapped span's own raw span."""
        return self.inner.raw_span()

    def get_correlation_data_for_logs(self) -> dict[str, Any]:
        """Return the wrapped span's fields for log lines."""
        return self.inner.get_correlation_data_for_logs()

    def __getattr__(self, name: str) -> Any:
        """Forward attributes that only the wrapped span has."""
        return _handed_on(self, "inner", name)


class RetrievalTracer(Tracer):
    """A tracer that opens spans in the wrapped tracer and records each span's documents in `RUNS`.

    Args:
        around: The wrapped tracer.
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
        """Open a span inside `parent_span`, else inside the active span of this task or thread."""
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
            # Without the ContextVar's token, because an async generator may end in another context.
            _ACTIVE.set(outer)
            RUNS.end(id)

    def current_span(self) -> Span | None:
        """Return the wrapped tracer's current span."""
        return self.around.current_span()

    def __getattr__(self, name: str) -> Any:
        """Forward attributes that only the wrapped tracer has."""
        return _handed_on(self, "around", name)


class UntracedRetrievalTracer(RetrievalTracer, NullTracer):
    """A `RetrievalTracer` for disabled tracing. Haystack treats a NullTracer as disabled."""


def listen() -> None:
    """Wrap the process's tracer in a `RetrievalTracer`, unless the tracer is wrapped already."""
    around = tracing.tracer.actual_tracer
    if not isinstance(around, RetrievalTracer):
        kind = UntracedRetrievalTracer if isinstance(around, NullTracer) else RetrievalTracer
        tracing.tracer.actual_tracer = kind(around)


def retrieved_for(prompt: Sequence[ChatMessage] | str) -> tuple[tuple[str, str], ...]:
    """Return (text, source) of the retrieved documents that a prompt contains."""
    return RUNS.retrieved((_ACTIVE.get() or None,), lambda: _prompt_text(prompt))


def _handed_on(own: object, other: str, name: str) -> Any:
    """Return an attribute of `own.<other>`; AttributeError if a new copy has no `<other>` yet."""
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
