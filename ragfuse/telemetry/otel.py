"""OpenTelemetry spans of an answer: plan, load, fuse and decode under one `ragfuse.answer`.

Only opentelemetry-api is used, and only if it is installed; without an SDK nothing is recorded, at almost no cost.
Attributes have the names of the semantic conventions for generative AI where these have one. They never contain text of
a question, document or answer. Counts over many answers are in `counters.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from time import perf_counter, time_ns
from typing import Any, Concatenate, ParamSpec, TypeVar

from ragfuse.settings import Settings
from ragfuse.types.answer import Answer
from ragfuse.types.plan import LoadPlan

log = logging.getLogger("ragfuse")

Span = Any
"""An OpenTelemetry span."""
Tracer = Any
"""An OpenTelemetry tracer, which makes spans."""
P = ParamSpec("P")
R = TypeVar("R")
_SUMS = ("tokens", "tokens_reused", "tokens_recomputed", "tokens_fresh", "nbytes")
Attributes = dict[str, str | bool | int | float | list[str]]


E = TypeVar("E")
"""An engine, which has settings and counters."""
Q = TypeVar("Q")
"""The request for an answer, or its options: an `Ask`."""


@contextmanager
def span(name: str) -> Iterator[Span | None]:
    """Open a span `ragfuse.<name>` under the current one, which also records exceptions; None without a recorder."""
    tracer = _tracer()
    if tracer is None:
        yield None
        return
    with tracer.start_as_current_span(f"ragfuse.{name}") as current:
        yield current if current.is_recording() else None


def spanned(name: str, attributes_of: Callable[[Any], Attributes]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that gives each call a span, whose attributes `attributes_of` derives from the result."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name) as current:
                result = function(*args, **kwargs)
                if current is not None:
                    current.set_attributes(attributes_of(result))
                return result

        return call

    return decorate


def answered(method: Callable[[E, Q], Answer]) -> Callable[[E, Q], Answer]:
    """Decorate an engine's answer method: give it the root span, and count and log its answers."""

    @wraps(method)
    def call(engine: Any, request: Any) -> Answer:
        streams = request.say is not None
        return _counted("answer", engine, request.ask, streams, lambda: [method(engine, request)])[0]

    return call


def batched(
    method: Callable[Concatenate[E, Any, Q, P], list[Answer]],
) -> Callable[Concatenate[E, Any, Q, P], list[Answer]]:
    """Decorate an engine's method that answers several prompts as one batch, like `answered`."""

    @wraps(method)
    def call(engine: Any, prompts: Any, ask: Any, /, *args: P.args, **kwargs: P.kwargs) -> list[Answer]:
        return _counted("batch", engine, ask, False, lambda: method(engine, prompts, ask, *args, **kwargs))

    return call


def _counted(name: str, engine: Any, ask: Any, streams: bool, call: Callable[[], list[Answer]]) -> list[Answer]:
    """Call under the root span of a request; count the answers, or the request as failed if it raises an error."""
    try:
        with span(name) as current:
            if current is not None:
                current.set_attributes(_request_attributes(engine.settings, ask, streams))
            answers = call()
            for answer in answers:
                engine.counters.add(answer)
                log.info(answer.trace.summary)
            if current is not None and answers:
                current.set_attributes(answer_attributes(answers))
                if streams:
                    current.set_attribute("gen_ai.response.time_to_first_chunk", answers[0].trace.ttft_s)
            return answers
    except Exception:
        engine.counters.fail()
        raise


@contextmanager
def loading(reader: Any, plan: LoadPlan) -> Iterator[Any]:
    """Open a reader of layers, with a span that lasts until its last layer is read, beside the span of the prefill."""
    tracer = _tracer() if plan.fetches else None
    load_span = tracer.start_span("ragfuse.load", attributes=_reads(plan)) if tracer is not None else None
    try:
        with reader:
            yield reader
    finally:
        if load_span is not None:
            load_span.set_attributes({"ragfuse.load_s": reader.load_s, "ragfuse.wait_s": reader.wait_s})
            since_s = perf_counter() - reader.last_s if reader.last_s else 0.0
            load_span.end(time_ns() - round(since_s * 1e9))


def plan_attributes(plan: LoadPlan) -> Attributes:
    """Return span attributes of a plan."""
    attributes: Attributes = {
        "ragfuse.policy": plan.policy,
        "ragfuse.ratio": plan.ratio,
        "ragfuse.tokens": len(plan.prompt),
        "ragfuse.hits": len(plan.fetches),
        "ragfuse.misses": len(plan.misses),
        "ragfuse.fallback_reason": plan.fallback_reason,
    }
    if plan.forecast is not None:
        attributes |= {
            "ragfuse.predicted_ttft_s": plan.forecast.ttft_s,
            "ragfuse.predicted_load_s": plan.forecast.load_s,
        }
    return attributes


def prefill_attributes(prefill: Any) -> Attributes:
    """Return span attributes of a prefilled prompt."""
    return {"ragfuse.tokens": len(prefill.token_ids), "ragfuse.mean_ratio": prefill.mean_ratio}


def _reads(plan: LoadPlan) -> Attributes:
    return {
        "ragfuse.tiers": sorted({fetch.tier for fetch in plan.fetches}),
        "ragfuse.nbytes": sum(fetch.nbytes for fetch in plan.fetches),
        "ragfuse.hits": len(plan.fetches),
    }


def answer_attributes(answers: Sequence[Answer]) -> Attributes:
    """Return span attributes of answers: what all together reused, and the longest times.

    For a single answer they include its policy, ratios, forecast and reason for a full prefill.
    """
    traces = [answer.trace for answer in answers]
    segments = [segment for trace in traces for segment in trace.segments]
    attributes: Attributes = {
        "gen_ai.response.finish_reasons": [answer.finish_reason for answer in answers],
        "gen_ai.usage.input_tokens": sum(trace.tokens for trace in traces),
        "gen_ai.usage.output_tokens": sum(len(answer.token_ids) for answer in answers),
        "gen_ai.usage.cache_read.input_tokens": sum(trace.tokens_found for trace in traces),
        **{f"ragfuse.{name}": sum(getattr(trace, name) for trace in traces) for name in _SUMS},
        "ragfuse.tiers": sorted({segment.tier for segment in segments if segment.hit}),
        "ragfuse.hits": sum(segment.hit and not segment.goes_on for segment in segments),
        "ragfuse.misses": sum(not (each.hit or each.goes_on) for each in segments),
        "ragfuse.ttft_s": max(trace.ttft_s for trace in traces),
        "ragfuse.total_s": max(trace.total_s for trace in traces),
    }
    if len(traces) > 1:
        return {**attributes, "ragfuse.answers": len(traces)}
    (trace,) = traces
    if trace.predicted_ttft_s is not None:
        attributes["ragfuse.predicted_ttft_s"] = trace.predicted_ttft_s
    return attributes | {
        "ragfuse.policy": trace.policy,
        "ragfuse.ratio": trace.ratio,
        "ragfuse.mean_ratio": trace.mean_ratio,
        "ragfuse.fallback_reason": trace.fallback_reason,
    }


planned, fused = spanned("plan", plan_attributes), spanned("fuse", prefill_attributes)
"""Decorators that give spans to functions that return a plan, and to functions that return a prefill."""


def _request_attributes(settings: Settings, ask: Any, streams: bool) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ragfuse",
        "gen_ai.request.model": settings.model,
        "gen_ai.request.stream": streams,
        "gen_ai.request.max_tokens": ask.max_tokens or settings.max_tokens,
        "ragfuse.reuse": ask.reuse,
    }
    return attributes | ({"gen_ai.request.seed": ask.seed} if ask.seed is not None else {})


def _tracer() -> Tracer | None:
    """Return the current tracer; None without opentelemetry-api, or until an SDK is set up."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider.get_tracer("ragfuse")
