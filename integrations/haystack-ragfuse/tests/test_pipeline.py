"""A pipeline in which nothing but the generator changed: its second question reuses its
documents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import pytest
from haystack import tracing
from haystack.dataclasses import StreamingChunk
from haystack.tracing import Span, Tracer
from haystack_integrations.components.generators.ragfuse import RagfuseChatGenerator, retrieved
from haystack_integrations.components.generators.ragfuse.retrieved import RetrievalTracer

from integrations.tests.haystack_pipelines import DOCUMENTS, asked, given, hits, rag
from ragfuse import Engine

FIRST, SECOND = "Who was the harbour master?", "Which oil did the lighthouse burn?"


@pytest.fixture
def llm(engine: Engine) -> RagfuseChatGenerator:
    return RagfuseChatGenerator(engine=engine, generation_kwargs={"ratio": 0.2})


def test_the_second_question_reuses_every_document_in_another_order(
    llm: RagfuseChatGenerator, engine: Engine
) -> None:
    pipeline = rag(llm)
    first = asked(pipeline, FIRST)
    assert hits(first) == [False] * 4
    assert first.meta["usage"]["prompt_tokens_details"]["cache_creation_tokens"] > 1000
    engine.flush()
    second = asked(pipeline, SECOND)
    assert hits(second) == [True] * 4
    sources = [
        [each["source"] for each in reply.meta["ragfuse"]["segments"] if each["kind"] == "chunk"]
        for reply in (first, second)
    ]
    assert sorted(sources[0]) == sorted(sources[1]) == [f"letter-{number}" for number in range(4)]
    assert sources[0] != sources[1]
    assert second.meta["ragfuse"]["tokens_reused"] > 0
    assert len(retrieved.RUNS) == 0


async def test_an_awaited_pipeline_hears_its_documents_too(
    llm: RagfuseChatGenerator, engine: Engine
) -> None:
    pipeline = rag(llm)
    await pipeline.run_async(given(FIRST))
    await asyncio.to_thread(engine.flush)
    several = await asyncio.gather(*(pipeline.run_async(given(SECOND)) for _ in range(3)))
    replies = [each["llm"]["replies"][0] for each in several]
    assert [hits(reply) for reply in replies] == [[True] * 4] * 3
    assert {reply.text for reply in replies} == {asked(pipeline, SECOND).text}
    assert len(retrieved.RUNS) == 0


def test_documents_may_be_named_to_the_generator_itself_or_connected(
    llm: RagfuseChatGenerator, engine: Engine
) -> None:
    text = "\n\n".join(document.content or "" for document in DOCUMENTS)
    llm.run(f"{text}\n\n{FIRST}", documents=DOCUMENTS)
    engine.flush()
    (reply,) = llm.run(f"{text}\n\n{SECOND}", documents=DOCUMENTS)["replies"]
    assert hits(reply) == [True] * 4
    pipeline = rag(llm)
    pipeline.connect("retriever.documents", "llm.documents")
    assert hits(asked(pipeline, SECOND)) == [True] * 4


@pytest.mark.slow
def test_the_embedded_model_answers_from_reused_documents(real_engine: Engine) -> None:
    pipeline = rag(RagfuseChatGenerator(engine=real_engine, generation_kwargs={"ratio": 0.3}))
    asked(pipeline, "Which colour is the lighthouse painted?")
    real_engine.flush()
    second = asked(pipeline, "In which year was the harbour of Port Elling dug?")
    assert hits(second) == [True] * 4
    assert second.meta["ragfuse"]["tokens_reused"] > second.meta["ragfuse"]["tokens"] // 2
    assert "1847" in (second.text or "")


# beside another tracer


class NotedSpan(Span):
    """A span that keeps its tags."""

    def __init__(self, name: str, parent: Span | None) -> None:
        self.name, self.parent, self.tags, self.own = name, parent, dict[str, Any](), "own"

    def set_tag(self, key: str, value: Any) -> None:
        self.tags[key] = value


class NotedTracer(Tracer):
    """A user's tracer that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[NotedSpan] = []

    @contextmanager
    def trace(
        self,
        operation_name: str,
        tags: dict[str, Any] | None = None,
        parent_span: Span | None = None,
    ) -> Iterator[Span]:
        span = NotedSpan(operation_name, parent_span)
        span.set_tags(tags or {})
        self.spans.append(span)
        yield span

    def current_span(self) -> Span | None:
        return self.spans[-1]


@pytest.mark.parametrize("enabled", ["before", "after"])
def test_a_users_tracer_gets_its_own_spans_and_no_content(
    enabled: str, llm: RagfuseChatGenerator, engine: Engine
) -> None:
    tracer = NotedTracer()
    tracing.disable_tracing()
    if enabled == "before":
        tracing.enable_tracing(tracer)
        llm = RagfuseChatGenerator(engine=engine)
    pipeline = rag(llm)
    if enabled == "after":
        tracing.enable_tracing(tracer)
    asked(pipeline, FIRST)
    engine.flush()
    assert hits(asked(pipeline, SECOND)) == [True] * 4
    assert tracing.is_tracing_enabled()
    names = [span.name for span in tracer.spans]
    assert names == ["haystack.pipeline.run", *["haystack.component.run"] * 3] * 2
    assert {span.parent for span in tracer.spans[1:4]} == {tracer.spans[0]}
    assert not any("haystack.component.output" in span.tags for span in tracer.spans)
    assert tracing.tracer.current_span() is tracer.spans[-1]
    with tracing.tracer.trace("mine") as span:
        assert (span.raw_span().own, span.own) == ("own", "own")
        assert copy(span).own == "own"
    assert tracing.tracer.actual_tracer.spans is tracer.spans  # type: ignore[attr-defined]


def test_where_nobody_traces_haystack_says_so(llm: RagfuseChatGenerator) -> None:
    assert isinstance(tracing.tracer.actual_tracer, RetrievalTracer)
    assert not tracing.is_tracing_enabled()
    around = tracing.tracer.actual_tracer
    llm.warm_up()
    assert tracing.tracer.actual_tracer is around


async def test_a_streamed_pipeline_that_is_left_leaves_no_run_behind(
    llm: RagfuseChatGenerator,
) -> None:
    pipeline = rag(llm)
    async for _ in pipeline.run_async_generator(given(FIRST)):
        break
    seen: list[StreamingChunk] = []
    reply = (
        await pipeline.run_async({**given(SECOND), "llm": {"streaming_callback": seen.append}})
    )["llm"]["replies"]
    assert "".join(chunk.content for chunk in seen) == reply[0].text
