"""The KV that a computed prompt leaves for the next turn of its conversation: spans of tokens, their keys, their rows.

Values only: `engine/history.py` decides what is saved, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ragfuse.plan.controller import is_exact
from ragfuse.sessions.session import KVSpan, PendingTurn
from ragfuse.types.keys import ChunkKey, digest, filler_context, token_digest
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import LoadPlan

Spans = tuple[tuple[int, int], ...]
"""Ranges lo:hi of a prompt's rows, in order."""
Saves = tuple[tuple[KVSpan, Spans], ...]
"""Spans to save, each with its rows of the prompt."""


@dataclass(frozen=True)
class TurnKV:
    """The KV that a prompt leaves for the next turn of its conversation.

    Args:
        history: The spans that it began with. A span whose KV was lost is recomputed and has a new key.
        asked: The spans of its new tokens, and of turns that were left out.
        behind: The context (`ChunkKey.context`) of tokens that follow the prompt.
        saves: The spans to save, with their rows of the prompt.
    """

    history: tuple[KVSpan, ...]
    asked: tuple[KVSpan, ...]
    behind: str
    saves: Saves


def left_by(plan: LoadPlan, talk: PendingTurn, key_of: Callable[[Sequence[int], str], ChunkKey]) -> TurnKV:
    """Return the KV that a prompt leaves for the next turn.

    KV that attended to exact rows only gets the tokens before it as its context. Other KV gets a digest of how it was
    computed, so that it is never taken for exact.

    Args:
        plan: The plan by which the prompt was computed.
        talk: The turn that it answers.
        key_of: Makes the key of token ids and their context.
    """
    prompt, ids, history = plan.prompt, plan.prompt.token_ids, list[KVSpan]()
    saves, at, end = list[tuple[KVSpan, Spans]](), 0, len(plan.prompt.segments)
    lost = {segment for segment, _ in plan.misses} - {fetch.segment for fetch in plan.unread}
    inexact = [f.segment for f in plan.fetches if f.level != LEVEL_NAMES[0] or not is_exact(prompt, f)]

    def key(tokens: Sequence[int], segment: int, row: int, alone: bool = True) -> ChunkKey:
        """Return the key of tokens computed after the first `row` rows, which are all segments before `segment`."""
        if alone and segment <= min(inexact, default=end):
            return key_of(tokens, token_digest(ids[:row]) if row else "")
        return key_of(tokens, filler_context(digest("history", _made(plan), str(row))))

    for stretch in talk.history:
        mine = range(at, at + len(stretch.kept))
        at = mine.stop
        if lost.isdisjoint(mine):
            history.append(stretch)
            continue
        for lo, hi, segment in _cut(stretch, mine):
            tokens = stretch.tokens[lo:hi]
            if segment < 0:
                history.append(KVSpan(tokens, stretch.key, ()))
                continue
            span = prompt.spans[segment]
            history.append(KVSpan.whole(tokens, key(tokens, segment, span[0])))
            saves.append((history[-1], (span,)))
    n_past = prompt.spans[at - 1][1] if at else 0
    behind = list(zip(prompt.segments, prompt.spans, strict=True))[at:]
    left_out = [] if talk.keep_chunks else [span for segment, span in behind if segment.kind == "chunk"]
    spans = tuple(span for _, span in behind if span not in left_out)
    row, gone = talk.omitted

    def asked(first: int, stop: int) -> Iterator[tuple[KVSpan, Spans]]:
        rows = _joined([(max(first, lo), min(stop, hi)) for lo, hi in spans if lo < stop and first < hi])
        tokens = tuple(id for lo, hi in rows for id in ids[lo:hi])
        if tokens:
            yield KVSpan.whole(tokens, key(tokens, end, first, not left_out)), rows

    made = [*asked(n_past, row if gone else len(ids))]
    if gone:
        made += [(KVSpan(gone, key(gone, end, row, alone=False), ()), ()), *asked(row, len(ids))]
    follows = key((), end, len(ids), not left_out).context
    return TurnKV(
        tuple(history), tuple(each for each, _ in made), follows, (*saves, *(each for each in made if each[1]))
    )


def _cut(stretch: KVSpan, segments: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield all tokens of a span as lo, hi and the prompt's segment that has them; -1 for dropped tokens."""
    done = 0
    for (lo, hi), segment in zip(stretch.kept, segments, strict=True):
        if done < lo:
            yield done, lo, -1
        yield lo, hi, segment
        done = hi
    if done < len(stretch.tokens):
        yield done, len(stretch.tokens), -1


def _made(plan: LoadPlan) -> str:
    """Return a digest of how a prompt was computed: tokens, policy, ratio and entries read."""
    read = [f"{fetch.segment} {fetch.key} {fetch.level}" for fetch in plan.fetches]
    prompt = token_digest(plan.prompt.token_ids)
    return digest("made", prompt, plan.policy, repr(plan.ratio), *read)


def _joined(spans: Sequence[tuple[int, int]]) -> Spans:
    """Return the same rows with adjacent ranges joined."""
    joined: list[tuple[int, int]] = []
    for lo, hi in spans:
        if joined and joined[-1][1] == lo:
            lo = joined.pop()[0]
        joined.append((lo, hi))
    return tuple(joined)
