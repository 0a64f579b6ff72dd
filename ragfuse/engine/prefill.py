"""Stage 4, prefill: compute the first logits of a prompt from its loaded layers."""

from __future__ import annotations

import time

from ragfuse.engine.fetch import FetchedKV
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.request import PreparedPrompt
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.kept_states import TenantStates
from ragfuse.hf.model import HFModel, KVSource, Prefill
from ragfuse.telemetry.otel import fused
from ragfuse.types.answer import StreamTrace
from ragfuse.types.plan import is_blended


def prefill(fetched: FetchedKV, prefixes: PrefixCache) -> PreparedPrompt:
    """Return the prefilled prompt, and note how long that took.

    Args:
        fetched: The layers that its plan loads.
        prefixes: Keeps the states of models whose cache is not KV per token.

    Raises:
        InputError: The request was cancelled; the prefill ends before its next layer.
        LostRun: An entry of the plan cannot be read any more.
    """
    request, plan, reader, stream = fetched.request, fetched.plan, fetched.reader, fetched.stream
    model = request.model
    states = prefixes.kept_states() if request.ask.reuse and model.profile.state else None
    with model.before_layers(request.check_open):
        found = _prefill(model, fetched, states)
    load_s, wait_s, trace = reader.load_s, reader.wait_s, None
    compute_s = time.perf_counter() - fetched.began_s - reader.wait_s
    if stream is not None:
        load_s, wait_s = load_s + stream.load_s, wait_s + stream.load_s + stream.wait_s
        compute_s -= stream.wait_s
        trace = StreamTrace(tuple(stream.pieces), stream.terms.prior)
    was_read = stream is None or not stream.received
    request.runtime.timings.note(
        model, plan, reader.load_s if was_read else None, None if model.profile.state else compute_s
    )
    return PreparedPrompt(request, plan, found, load_s, wait_s, compute_s, trace)


@fused
def _prefill(model: HFModel, fetched: FetchedKV, states: TenantStates | None) -> Prefill:
    """Compute what the plan does not load: the whole prompt, the tokens after a kept state, or the
    selected rows.
    """
    plan, prompt = fetched.plan, fetched.plan.prompt
    if plan.fallback_reason and model.profile.state and prompt.schema_use is None:
        return model.prefill_state(prompt.token_ids, states)
    if plan.fallback_reason:
        return model.full_prefill(prompt.token_ids, prompt.positions)
    runs = list[CachedRun]()
    for fetch in plan.fetches:
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        runs.append(CachedRun(fetch.segment, lo, hi, segment.shift, is_blended(prompt, fetch)))
    source = fetched if runs else KVSource()
    ids, positions, asked = prompt.token_ids, prompt.positions, prompt.question_rows
    return model.fuse(ids, positions, runs, source, plan.policy, plan.ratio, question_rows=asked)
