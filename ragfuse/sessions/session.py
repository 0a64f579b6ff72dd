"""Conversations as values: turns, and spans of tokens with the key of their KV. No model, no store, no I/O.

The key of a span depends on its tokens and their context, not on its position. Truncation therefore only changes which
rows of it are used and where they start; the stored bytes stay the same (AttentionStore 3.4).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ragfuse.types.answer import ToolCall
from ragfuse.types.keys import ChunkKey, digest

VERSION = 2
"""Version of the stored form of a session; sessions of other versions are not read."""

Part = tuple[str, str, str]
"""A piece of a message: text, kind ("fresh" or "chunk") and source, which says where a chunk came from."""


@dataclass(frozen=True)
class HistoryMessage:
    """A message of a stored conversation.

    Args:
        role: "system", "user", "assistant" or "tool".
        parts: The pieces of its text.
        tool_calls: Tool calls that an assistant makes.
        tool_call_id: Of a tool's result: the call that it answers.
        name: Of a tool's result: the tool.
        reasoning: What an assistant thought before its answer.
    """

    role: str
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(part[0] for part in self.parts)

    @cached_property
    def digest(self) -> str:
        """A digest of role, text, tool calls and name, without white space around an assistant's text."""
        text = self.text.strip() if self.role == "assistant" else self.text
        calls = [[call.name, dict(call.arguments)] for call in self.tool_calls]
        return digest("message", self.role, text, json.dumps(calls, sort_keys=True), self.name)

    @property
    def has_chunks(self) -> bool:
        """Whether any of its pieces is a chunk."""
        return any(kind != "fresh" for _, kind, _ in self.parts)

    @property
    def bare(self) -> HistoryMessage | None:
        """The message without the chunks before and after its own text.

        None where it has no own text or no such chunks, or has chunks within its own text.
        """
        own = [at for at, (text, kind, _) in enumerate(self.parts) if kind == "fresh" and text.strip()]
        inside = replace(self, parts=self.parts[own[0] : own[-1] + 1] if own else ())
        if not own or inside.has_chunks or len(inside.parts) == len(self.parts):
            return None
        return replace(self, parts=((inside.text.strip(), "fresh", ""),))


def prefix_digests(messages: Sequence[HistoryMessage]) -> list[str]:
    """Return for each message the digest of all messages up to it, which identifies a conversation up to there."""
    return list(accumulate((message.digest for message in messages), lambda before, each: digest(before, each)))


def is_same(given: HistoryMessage, stored: HistoryMessage) -> bool:
    """Return whether two messages have the same content."""
    return given.digest == stored.digest


def is_again(given: HistoryMessage, stored: HistoryMessage) -> bool:
    """Return whether `given` is the message `stored`, sent again.

    A user's message may come without the chunks that were retrieved for it. If it has chunks they must be the same, as
    other chunks make it another question.
    """
    bare = stored.bare if given.role == "user" and not given.has_chunks else None
    if bare is None:
        return is_same(given, stored)
    return is_same(given, stored) or is_same(replace(given, parts=((given.text.strip(), "fresh", ""),)), bare)


@dataclass(frozen=True)
class KVSpan:
    """Consecutive tokens of a conversation whose KV is one entry of the store.

    Args:
        tokens: The token ids.
        key: The entry's key.
        kept: Ranges lo:hi, in order, of the tokens that prompts still use; truncation drops the others.
    """

    tokens: tuple[int, ...]
    key: ChunkKey
    kept: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, tokens: Sequence[int], key: ChunkKey) -> KVSpan:
        """Return a span of which all tokens are kept."""
        return cls(tuple(tokens), key, ((0, len(tokens)),))

    @property
    def n_kept(self) -> int:
        """Number of tokens that prompts still use."""
        return sum(hi - lo for lo, hi in self.kept)

    def without(self, first: int, count: int) -> KVSpan:
        """Return the span with `count` of its kept tokens dropped, from index `first` among these on."""
        kept: list[tuple[int, int]] = []
        at = 0
        for lo, hi in self.kept:
            ranges = ((lo, min(hi, lo + max(0, first - at))), (max(lo, min(hi, lo + first + count - at)), hi))
            kept += [each for each in ranges if each[0] < each[1]]
            at += hi - lo
        return replace(self, kept=tuple(kept))


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Args:
        messages: The new messages; the last one is the answer.
        answer_ids: The answer's token ids as they were generated; tokenising its text may give others.
        kv_spans: The spans of KV that the turn added.
    """

    messages: tuple[HistoryMessage, ...]
    answer_ids: tuple[int, ...]
    kv_spans: tuple[KVSpan, ...]

    @property
    def n_tokens(self) -> int:
        """Number of tokens of its spans, dropped ones included."""
        return sum(len(kv_span.tokens) for kv_span in self.kv_spans)


@dataclass(frozen=True)
class Session:
    """A conversation: its name and its turns. Immutable; each turn makes a new value."""

    id: str
    turns: tuple[Turn, ...] = ()

    @property
    def messages(self) -> tuple[HistoryMessage, ...]:
        """All messages, including answers."""
        return tuple(message for turn in self.turns for message in turn.messages)

    @property
    def sources(self) -> frozenset[str]:
        """Where the chunks in its messages came from."""
        parts = (part for message in self.messages for part in message.parts)
        return frozenset(source for _, _, source in parts if source)

    @property
    def kv_spans(self) -> tuple[KVSpan, ...]:
        """The spans of all turns, in order."""
        return tuple(kv_span for turn in self.turns for kv_span in turn.kv_spans)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all turns, dropped ones included."""
        return sum(turn.n_tokens for turn in self.turns)

    @property
    def dropped(self) -> int:
        """Number of tokens that prompts no longer use."""
        return self.n_tokens - sum(kv_span.n_kept for kv_span in self.kv_spans)

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """The keys of all its KV, including that of dropped tokens."""
        return tuple(dict.fromkeys(kv_span.key for kv_span in self.kv_spans))

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """For each turn, the digest of all messages up to its end (`prefix_digests`)."""
        digests = prefix_digests(self.messages)
        return tuple(digests[at - 1] for at in accumulate(len(turn.messages) for turn in self.turns))

    def upto(self, turns: int) -> Session:
        """Return the session with its first `turns` turns only."""
        return replace(self, turns=self.turns[:turns])

    def with_kv_spans(self, kv_spans: Sequence[KVSpan]) -> Session:
        """Return the session with its spans replaced; they are assigned to turns by their numbers of tokens."""
        unassigned, turns = list(kv_spans), list[Turn]()
        for turn in self.turns:
            assigned: list[KVSpan] = []
            while unassigned and sum(len(each.tokens) for each in assigned) < turn.n_tokens:
                assigned.append(unassigned.pop(0))
            turns.append(replace(turn, kv_spans=tuple(assigned)))
        return replace(self, turns=tuple(turns))

    def as_dict(self) -> dict[str, Any]:
        """Return the session in plain JSON types."""
        fields: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return {"version": VERSION, **fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Session | None:
        """Read the result of `as_dict`; return None for another version, or a dict that is not a session."""
        try:
            return _adapter().validate_python(fields) if fields.get("version") == VERSION else None
        except ValidationError:
            return None


@cache
def _adapter() -> TypeAdapter[Session]:
    return TypeAdapter(Session)


def truncated(
    kv_spans: Sequence[KVSpan], max_tokens: int, window: int, ratio: float, sinks: int = 0
) -> tuple[KVSpan, ...]:
    """Drop the earliest tokens of a history until at most `max_tokens` remain (AttentionStore 3.4).

    Tokens are dropped in steps of `ratio * window`, so that the next turns fit too. Keys do not change.

    Args:
        kv_spans: The history's spans.
        max_tokens: Most tokens that remain.
        window: Tokens of the context window.
        ratio: The share of the window that one step drops, 0..1.
        sinks: How many first tokens always stay (attention sinks).

    Returns:
        The spans; unchanged if they fit already. More than `max_tokens` tokens remain only where the sinks alone are
        more.
    """
    n_past = sum(kv_span.n_kept for kv_span in kv_spans)
    if n_past <= max_tokens:
        return tuple(kv_spans)
    step = max(1, int(ratio * window))
    n_dropped = min(max(0, n_past - sinks), step * -(-(n_past - max_tokens) // step))
    shorter, at = list[KVSpan](), 0
    for kv_span in kv_spans:
        lo, hi = max(sinks, at), min(sinks + n_dropped, at + kv_span.n_kept)
        shorter.append(kv_span.without(lo - at, hi - lo) if lo < hi else kv_span)
        at += kv_span.n_kept
    return tuple(shorter)


def matched(kv_spans: Sequence[KVSpan], token_ids: Sequence[int]) -> tuple[KVSpan, ...]:
    """Return the leading spans whose tokens `token_ids` begins with; at least one id stays unmatched."""
    at, count = 0, 0
    ids = tuple(token_ids)
    for kv_span in kv_spans:
        if at + len(kv_span.tokens) >= len(ids) or ids[at : at + len(kv_span.tokens)] != kv_span.tokens:
            break
        at, count = at + len(kv_span.tokens), count + 1
    return tuple(kv_spans[:count])


def agreed(
    session: Session,
    given: Sequence[HistoryMessage],
    matches: Callable[[HistoryMessage, HistoryMessage], bool] = is_same,
) -> Session:
    """Return the session with only those first turns that the given messages begin with.

    Args:
        session: The session.
        given: The messages of a new question.
        matches: Whether a given message is the stored one.
    """
    rest = list(given)
    for count, turn in enumerate(session.turns):
        sent, rest = rest[: len(turn.messages)], rest[len(turn.messages) :]
        if len(sent) < len(turn.messages) or not all(map(matches, sent, turn.messages)):
            return session.upto(count)
    return session


def names_of(session: Session) -> dict[ChunkKey, str]:
    """Return for each span's key the name of its turn, such as "turn 2", for traces."""
    return {kv_span.key: f"turn {number}" for number, turn in enumerate(session.turns, 1) for kv_span in turn.kv_spans}


@dataclass(frozen=True)
class PendingTurn:
    """The turn of a conversation that is being answered.

    Args:
        session: The conversation with the earlier turns that the question continues.
        messages: The new messages.
        version: Version of the stored session; 0 for a new one.
        persistent: Whether the session is written to the catalog.
        keep_chunks: Whether retrieved chunks are kept as part of the conversation.
        previous_keys: Keys of the stored session's KV.
        history: The spans that the prompt begins with, truncated as they are used in it.
        omitted: Of whole turns that were left out: the row before which they stood, and their tokens. A prompt with
            such turns has no history.
    """

    session: Session
    messages: tuple[HistoryMessage, ...]
    version: int = 0
    persistent: bool = False
    keep_chunks: bool = True
    previous_keys: tuple[ChunkKey, ...] = ()
    history: tuple[KVSpan, ...] = field(default=())
    omitted: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def id(self) -> str:
        """The session's name."""
        return self.session.id

    def placed(self) -> Iterator[tuple[int, int, KVSpan]]:
        """Yield lo, hi and span for each range of rows that the prompt uses of its history, in order."""
        for kv_span in self.history:
            yield from ((lo, hi, kv_span) for lo, hi in kv_span.kept)
