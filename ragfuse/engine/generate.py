"""Stage 5, generate: decode the answer of a prefilled prompt, streaming it while it is generated.

Answers that are generated at the same time are decoded in one batch by `hf.decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragfuse.engine.answer_stream import StopSignal
from ragfuse.engine.constraints import OutputConstraints
from ragfuse.engine.request import PreparedPrompt
from ragfuse.engine.trace_builder import trace_of
from ragfuse.hf.handover import generate
from ragfuse.hf.shared_kv import SharedSpan
from ragfuse.hf.stream import Follower
from ragfuse.telemetry.otel import span
from ragfuse.types.answer import Answer


@dataclass(frozen=True)
class Generated:
    """A generated answer.

    Args:
        prepared: The prompt that it answers.
        answer: The answer.
        token_ids: The ids as generated.
        is_whole: Whether it was not abandoned by its reader, so that it becomes part of its
            conversation.
    """

    prepared: PreparedPrompt
    answer: Answer
    token_ids: Sequence[int]
    is_whole: bool


def share(prepared: PreparedPrompt) -> None:
    """Share the KV of modules and prefixes in memory with other answers that are generated at the
    same time.
    """
    request, cache, plan = prepared.request, prepared.prefill.cache, prepared.plan
    runtime, wiring = request.runtime, request.model.shared_wiring
    if not runtime.settings.share or not (request.has_company or request.model.batcher.active):
        return
    if cache is None or wiring is None or plan.fallback_reason or prepared.stream is not None:
        return
    spans = []
    for fetch in plan.fetches:
        segment, (lo, hi) = plan.prompt.segments[fetch.segment], plan.prompt.spans[fetch.segment]
        if segment.kind in ("module", "prefix"):
            spans.append(SharedSpan(lo, hi, (fetch.key, fetch.level, segment.rows, segment.shift)))
    runtime.shared_kv.share(cache, sorted(spans, key=lambda span: span.lo), wiring.windows)


def generated(prepared: PreparedPrompt, constraints: OutputConstraints) -> Generated:
    """Generate and return the answer, streaming it to `request.say`; stop once one of
    `request.ends` is set.
    """
    request, draft = prepared.request, constraints.draft()
    follower = Follower(draft, request.say, request.ends)
    with span("decode"):
        options, seed = constraints.generate_options(), request.ask.seed
        ids = generate(request.model, prepared.prefill, options, [follower], seed)
        follower.end()
    answer = constraints.read(draft, trace_of(prepared, follower.first_s))
    is_whole = not any(map(_is_abandoned, request.ends))
    return Generated(prepared, answer, ids, is_whole)


def _is_abandoned(end: object) -> bool:
    """Return whether an end event means that nobody reads the answer, rather than that it is long
    enough.
    """
    return end.is_abandoned if isinstance(end, StopSignal) else end.is_set()  # type: ignore[attr-defined]
