"""The KV that a computed prompt leaves for the next turn of its conversation: spans of tokens, their keys, their rows.

Values only: `engine/history.py` decides what is saved, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ragfuse.sessions.session import KVSpan, PendingTurn
from ragfuse.types.keys import ChunkKey, digest, filler_context, token_digest
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import LoadPlan, is_exact

RowRanges = tuple[tuple[int, int], ...]
"""Ranges lo:hi of a prompt's rows, in order."""
Saves = tuple[tuple[KVSpan, RowRanges], ...]
"""Spans to save, each with its rows of the prompt."""


@dataclass(frozen=True)
class TurnKV:
    """The KV that a prompt leaves for the next turn of its conversation.

    Args:
        history: The spans that it began with. A span whose KV was lost is recomputed and has a new key.
        new_spans: The spans of its new tokens, and of turns that were left out.
        answer_context: The context (`ChunkKey.context`) of tokens that follow the prompt.
        saves: The spans to save, with their rows of the prompt.
    """

    history: tuple[KVSpan, ...]
    new_spans: tuple[KVSpan, ...]
    answer_context: str
    saves: Saves


def turn_kv_of(plan: LoadPlan, pending: PendingTurn, key_of: Callable[[Sequence[int], str], ChunkKey]) -> TurnKV:
    """Return the KV that a prompt leaves for the next turn.

    The key of KV that attended to exact rows only has the tokens before it as its context. The key of other KV has a
    digest of how it was computed, so that nothing takes that KV for exact.

    Args:
        plan: The plan by which the prompt was computed.
        pending: The turn that it answers.
        key_of: Makes the key of token ids and their context.
    """
    prompt, ids, history = plan.prompt, plan.prompt.token_ids, list[KVSpan]()
    saves, at, end = list[tuple[KVSpan, RowRanges]](), 0, len(plan.prompt.segments)
    missing = {segment for segment, _ in plan.misses} - {fetch.segment for fetch in plan.unread}
    inexact = [f.segment for f in plan.fetches if f.level != LEVEL_NAMES[0] or not is_exact(prompt, f)]

    def key(tokens: Sequence[int], segment: int, row: int, alone: bool = True) -> ChunkKey:
        """Return the key of tokens computed after the first `row` rows, which are all segments before `segment`."""
        if alone and segment <= min(inexact, default=end):
            return key_of(tokens, token_digest(ids[:row]) if row else "")
        return key_of(tokens, filler_context(digest("history", _plan_digest(plan), str(row))))

    for kv_span in pending.history:
        segments = range(at, at + len(kv_span.kept))
        at = segments.stop
        if missing.isdisjoint(segments):
            history.append(kv_span)
            continue
        for lo, hi, segment in _cut(kv_span, segments):
            tokens = kv_span.tokens[lo:hi]
            if segment < 0:
                history.append(KVSpan(tokens, kv_span.key, ()))
                continue
            rows = prompt.spans[segment]
            history.append(KVSpan.whole(tokens, key(tokens, segment, rows[0])))
            saves.append((history[-1], (rows,)))
    n_past = prompt.spans[at - 1][1] if at else 0
    after_history = list(zip(prompt.segments, prompt.spans, strict=True))[at:]
    left_out = [] if pending.keep_chunks else [rows for segment, rows in after_history if segment.kind == "chunk"]
    kept = tuple(rows for _, rows in after_history if rows not in left_out)
    row, omitted = pending.omitted

    def new_spans(first: int, stop: int) -> Iterator[tuple[KVSpan, RowRanges]]:
        """Yield the kept tokens of the rows first:stop as one span, with its rows; nothing where there are none."""
        rows = _joined([(max(first, lo), min(stop, hi)) for lo, hi in kept if lo < stop and first < hi])
        tokens = tuple(id for lo, hi in rows for id in ids[lo:hi])
        if tokens:
            yield KVSpan.whole(tokens, key(tokens, end, first, not left_out)), rows

    placed = [*new_spans(n_past, row if omitted else len(ids))]
    if omitted:
        placed += [(KVSpan(omitted, key(omitted, end, row, alone=False), ()), ()), *new_spans(row, len(ids))]
    answer_context = key((), end, len(ids), not left_out).context
    return TurnKV(
        tuple(history),
        tuple(kv_span for kv_span, _ in placed),
        answer_context,
        (*saves, *(each for each in placed if each[1])),
    )


def _cut(kv_span: KVSpan, segments: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield a span's tokens in order, as ranges lo, hi with the prompt's segment that has them; -1 for dropped ones."""
    at = 0
    for (lo, hi), segment in zip(kv_span.kept, segments, strict=True):
        if at < lo:
            yield at, lo, -1
        yield lo, hi, segment
        at = hi
    if at < len(kv_span.tokens):
        yield at, len(kv_span.tokens), -1


def _plan_digest(plan: LoadPlan) -> str:
    """Return a digest of how a prompt was computed: tokens, policy, ratio and entries read."""
    read = [f"{fetch.segment} {fetch.key} {fetch.level}" for fetch in plan.fetches]
    prompt = token_digest(plan.prompt.token_ids)
    return digest("made", prompt, plan.policy, repr(plan.ratio), *read)


def _joined(ranges: Sequence[tuple[int, int]]) -> RowRanges:
    """Return the same rows with adjacent ranges joined."""
    joined: list[tuple[int, int]] = []
    for lo, hi in ranges:
        if joined and joined[-1][1] == lo:
            lo = joined.pop()[0]
        joined.append((lo, hi))
    return tuple(joined)
