"""OpenTelemetry spans for plan, load, fuse and decode in `ragfuse.answer` or `ragfuse.batch`.

Without opentelemetry-api and an SDK, nothing is recorded and the overhead is negligible. Attributes
follow the semantic conventions for generative AI. They never contain questions, documents or
answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter, time_ns
from typing import Any

from ragfuse.settings import Settings
from ragfuse.types.answer import Answer

log = logging.getLogger("ragfuse")

_SUMS = ("tokens", "tokens_reused", "tokens_recomputed", "tokens_fresh", "nbytes")
_OF_ONE = ("predicted_ttft_s", "policy", "ratio", "mean_ratio", "fallback_reason")
Attributes = dict[str, Any]


@contextmanager
def span(name: str) -> Iterator[Any]:
    """Open a span `ragfuse.<name>` in the current span. Yield None if no tracer is configured."""
    tracer = _tracer()
    with tracer.start_as_current_span(f"ragfuse.{name}") if tracer else nullcontext() as current:
        yield current


planned, fused = span("plan"), span("fuse")
"""Decorators that open a span around each call of a function."""


@contextmanager
def counted(name: str, engine: Any, ask: Any, streams: bool = False) -> Iterator[list[Answer]]:
    """Open the span of a whole request; count and log the answers, or count the failure.

    Args:
        name: The name of the span, without the prefix `ragfuse.`.
        engine: The engine that answers.
        ask: The `Ask` of the request.
        streams: True if the answer is streamed.

    Yields:
        A list to which the caller appends the answers.
    """
    answers: list[Answer] = []
    try:
        with span(name) as current:
            if current is not None:
                current.set_attributes(_request_attributes(engine.settings, ask, streams))
            yield answers
            for answer in answers:
                engine.counters.add(answer)
                log.info(answer.trace.summary)
            if current is not None and answers:
                current.set_attributes(_answer_attributes(answers))
                if streams:
                    current.set_attribute(
                        "gen_ai.response.time_to_first_chunk", answers[0].trace.ttft_s
                    )
    except Exception:
        engine.counters.fail()
        raise


@contextmanager
def loading(reader: Any) -> Iterator[None]:
    """Open a span for the reads of a layer reader. The span ends when all layers are read."""
    tracer = _tracer() if reader.fetches else None
    load_span = tracer.start_span("ragfuse.load") if tracer else None
    try:
        yield
    finally:
        if load_span is not None:
            told = _named(
                tiers=sorted({fetch.tier for fetch in reader.fetches}),
                nbytes=sum(fetch.nbytes for fetch in reader.fetches),
                load_s=reader.load_s,
                wait_s=reader.wait_s,
            )
            load_span.set_attributes(told)
            since_s = perf_counter() - reader.last_s if reader.last_s else 0.0
            load_span.end(time_ns() - round(since_s * 1e9))


def _named(**values: Any) -> Attributes:
    return {f"ragfuse.{name}": value for name, value in values.items() if value is not None}


def _answer_attributes(answers: Sequence[Answer]) -> Attributes:
    """Return sums over all answers and, if there is only one, its policy, ratios and forecast."""
    traces = [answer.trace for answer in answers]
    sums = {name: sum(getattr(trace, name) for trace in traces) for name in _SUMS}
    of_one = {name: getattr(traces[0], name) for name in _OF_ONE} if len(traces) == 1 else {}
    return {
        "gen_ai.response.finish_reasons": [answer.finish_reason for answer in answers],
        "gen_ai.usage.input_tokens": sums["tokens"],
        "gen_ai.usage.output_tokens": sum(len(answer.token_ids) for answer in answers),
        "gen_ai.usage.cache_read.input_tokens": sum(trace.tokens_found for trace in traces),
        **_named(
            **sums,
            answers=len(answers),
            tiers=sorted(
                {segment.tier for trace in traces for segment in trace.segments if segment.hit}
            ),
            ttft_s=max(trace.ttft_s for trace in traces),
            **of_one,
        ),
    }


def _request_attributes(settings: Settings, ask: Any, streams: bool) -> Attributes:
    seed = {} if ask.seed is None else {"gen_ai.request.seed": ask.seed}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ragfuse",
        "gen_ai.request.model": settings.model,
        "gen_ai.request.stream": streams,
        "gen_ai.request.max_tokens": ask.max_tokens or settings.max_tokens,
        "ragfuse.reuse": ask.reuse,
        **seed,
    }


def _tracer() -> Any:
    """Return the tracer; None if opentelemetry-api or a configured SDK is missing."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    is_proxy = isinstance(provider, trace.ProxyTracerProvider)
    return None if is_proxy else provider.get_tracer("ragfuse")
