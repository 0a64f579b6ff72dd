"""OpenTelemetry spans of an answer: plan, load, fuse and decode under one `ragfuse.answer`.

Only opentelemetry-api is used, and only if it is installed; without an SDK nothing is recorded, at almost no cost.
Attributes have the names of the semantic conventions for generative AI where these have one. They never contain text of
a question, document or answer. Counts over many answers are in `counters.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter, time_ns
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ragfuse.settings import Settings
from ragfuse.telemetry.counters import AnswerCounters
from ragfuse.types.answer import Answer
from ragfuse.types.plan import LoadPlan

log = logging.getLogger("ragfuse")

Span = Any
"""An OpenTelemetry span."""
Tracer = Any
"""An OpenTelemetry tracer, which makes spans."""
P = ParamSpec("P")
R = TypeVar("R")
Attributes = dict[str, str | bool | int | float | list[str]]


class TracedEngine(Protocol):
    """An engine, as far as spans need it."""

    settings: Settings
    counters: AnswerCounters


class Options(Protocol):
    """The options of an answer: an `Ask`."""

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the answer."""
        ...

    @property
    def reuse(self) -> bool:
        """Whether cached KV may be used."""
        ...

    @property
    def seed(self) -> int | None:
        """The seed for sampling."""
        ...


class Reader(Protocol):
    """What reads the layers of a load plan, as far as tracing needs it: how long it loaded and waited, in seconds."""

    load_s: float
    wait_s: float
    last_s: float

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...


class PrefillResult(Protocol):
    """A prefilled prompt."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Its token ids."""
        ...

    @property
    def mean_ratio(self) -> float:
        """The share of cached rows that were recomputed, on average over the layers."""
        ...


E = TypeVar("E", bound=TracedEngine)
Q = TypeVar("Q", bound=Options)
L = TypeVar("L", bound=Reader)


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


class TracedRequest(Protocol):
    """The request for an answer."""

    @property
    def ask(self) -> Options:
        """Its options."""
        ...

    @property
    def say(self) -> object | None:
        """Receives the answer as it is streamed; None where it is not streamed."""
        ...


R2 = TypeVar("R2", bound=TracedRequest)


def answered(method: Callable[[E, R2], Answer]) -> Callable[[E, R2], Answer]:
    """Decorate an engine's answer method: give it the root span, and count and log its answers."""

    @wraps(method)
    def call(engine: E, request: R2) -> Answer:
        with _root_span("answer", engine, request.ask, request.say is not None) as current:
            answer = method(engine, request)
            engine.counters.add(answer)
            log.info(answer.trace.summary)
            if current is not None:
                current.set_attributes(answer_attributes([answer]))
                if request.say is not None:
                    current.set_attribute("gen_ai.response.time_to_first_chunk", answer.trace.ttft_s)
            return answer

    return call


def batched(
    method: Callable[Concatenate[E, Any, Q, P], list[Answer]],
) -> Callable[Concatenate[E, Any, Q, P], list[Answer]]:
    """Decorate an engine's method that answers several prompts as one batch, like `answered`."""

    @wraps(method)
    def call(engine: E, prompts: Any, ask: Q, /, *args: P.args, **kwargs: P.kwargs) -> list[Answer]:
        with _root_span("batch", engine, ask, False) as current:
            answers = method(engine, prompts, ask, *args, **kwargs)
            for answer in answers:
                engine.counters.add(answer)
                log.info(answer.trace.summary)
            if current is not None and answers:
                current.set_attributes(answer_attributes(answers))
            return answers

    return call


@contextmanager
def loading(reader: L, plan: LoadPlan) -> Iterator[L]:
    """Open a reader, with a span that lasts until its last layer is read; it runs beside the span of the prefill."""
    tracer = _tracer() if plan.fetches else None
    load_span = tracer.start_span("ragfuse.load", attributes=read_attributes(plan)) if tracer is not None else None
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


def read_attributes(plan: LoadPlan) -> Attributes:
    """Return span attributes of the reads of a plan."""
    return {
        "ragfuse.tiers": sorted({fetch.tier for fetch in plan.fetches}),
        "ragfuse.nbytes": sum(fetch.nbytes for fetch in plan.fetches),
        "ragfuse.hits": len(plan.fetches),
    }


def prefill_attributes(prefill: PrefillResult) -> Attributes:
    """Return span attributes of a prefill."""
    return {"ragfuse.tokens": len(prefill.token_ids), "ragfuse.mean_ratio": prefill.mean_ratio}


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
        "ragfuse.tokens": sum(trace.tokens for trace in traces),
        "ragfuse.tokens_reused": sum(trace.tokens_reused for trace in traces),
        "ragfuse.tokens_recomputed": sum(trace.tokens_recomputed for trace in traces),
        "ragfuse.tokens_fresh": sum(trace.tokens_fresh for trace in traces),
        "ragfuse.nbytes": sum(trace.nbytes for trace in traces),
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


@contextmanager
def _root_span(name: str, engine: TracedEngine, ask: Options, streams: bool) -> Iterator[Span | None]:
    """Open the root span of a request; count the request as failed if it raises an error."""
    try:
        with span(name) as current:
            if current is not None:
                current.set_attributes(_request_attributes(engine.settings, ask, streams))
            yield current
    except Exception:
        engine.counters.fail()
        raise


def _request_attributes(settings: Settings, ask: Options, streams: bool) -> Attributes:
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
    api = _api()
    if api is None:
        return None
    provider = api.get_tracer_provider()
    return None if isinstance(provider, api.ProxyTracerProvider) else provider.get_tracer("ragfuse", _version())


@lru_cache(1)
def _api() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


@lru_cache(1)
def _version() -> str:
    try:
        return version("ragfuse-kv")
    except PackageNotFoundError:  # from a folder that was never installed
        return ""
