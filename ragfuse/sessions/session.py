"""Conversations as values: turns, and spans of tokens with the key of their KV. No model, no store, no I/O.

The key of a span depends on its tokens and their context, not on its position. Truncation therefore only changes which
rows of it are used and where they start; the stored bytes stay the same (AttentionStore 3.4).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from ragfuse.types.answer import ToolCall
from ragfuse.types.keys import ChunkKey, digest

VERSION = 1
"""Version of the stored form of a session; sessions of other versions are not read."""

Part = tuple[str, str, str]
"""A piece of a message: text, kind and source. The kind is "fresh", "chunk" (marked by the caller) or "found" (a known
chunk found in a text); the source says where a chunk came from."""


@dataclass(frozen=True)
class HistoryMessage:
    """A message of a stored conversation.

    Args:
        role: "system", "user", "assistant" or "tool".
        parts: The pieces of its text, which are tokenised separately.
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
        """The message without the chunks before and after its own text; None where it has none, or some in between."""
        says = [at for at, (text, kind, _) in enumerate(self.parts) if kind == "fresh" and text.strip()]
        inside = replace(self, parts=self.parts[says[0] : says[-1] + 1] if says else ())
        if not says or inside.has_chunks or len(inside.parts) == len(self.parts):
            return None
        return replace(self, parts=((inside.text.strip(), "fresh", ""),))


def prefix_digests(messages: Sequence[HistoryMessage]) -> list[str]:
    """Return for each message the digest of all messages up to it, which identifies a conversation up to there."""
    return list(accumulate((message.digest for message in messages), lambda before, each: digest(before, each)))


def is_same(given: HistoryMessage, said: HistoryMessage) -> bool:
    """Return whether two messages have the same content."""
    return given.digest == said.digest


def is_again(given: HistoryMessage, said: HistoryMessage) -> bool:
    """Return whether `given` is the stored message `said`, sent again.

    A user's message may come without the chunks that were retrieved for it. If it has chunks they must be the same, as
    other chunks make it another question.
    """
    bare = said.bare if given.role == "user" and not given.has_chunks else None
    if bare is None:
        return is_same(given, said)
    return is_same(given, said) or is_same(replace(given, parts=((given.text.strip(), "fresh", ""),)), bare)


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
        left: list[tuple[int, int]] = []
        at = 0
        for lo, hi in self.kept:
            spans = ((lo, min(hi, lo + max(0, first - at))), (max(lo, min(hi, lo + first + count - at)), hi))
            left += [span for span in spans if span[0] < span[1]]
            at += hi - lo
        return replace(self, kept=tuple(left))


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Args:
        messages: The new messages; the last one is the answer.
        said: The answer's generated ids, which tokenising its text may not give.
        stretches: The spans of KV that the turn added.
    """

    messages: tuple[HistoryMessage, ...]
    said: tuple[int, ...]
    stretches: tuple[KVSpan, ...]

    @property
    def n_tokens(self) -> int:
        """Number of tokens of its spans, dropped ones included."""
        return sum(len(stretch.tokens) for stretch in self.stretches)


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
    def stretches(self) -> tuple[KVSpan, ...]:
        """The spans of all turns, in order."""
        return tuple(stretch for turn in self.turns for stretch in turn.stretches)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all turns, dropped ones included."""
        return sum(turn.n_tokens for turn in self.turns)

    @property
    def dropped(self) -> int:
        """Number of tokens that prompts no longer use."""
        return self.n_tokens - sum(stretch.n_kept for stretch in self.stretches)

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """The keys of all its KV, including that of dropped tokens."""
        return tuple(dict.fromkeys(stretch.key for stretch in self.stretches))

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """For each turn, the digest of all messages up to its end (`prefix_digests`)."""
        beginnings = prefix_digests(self.messages)
        return tuple(beginnings[at - 1] for at in accumulate(len(turn.messages) for turn in self.turns))

    def upto(self, turns: int) -> Session:
        """Return the session with its first `turns` turns only."""
        return replace(self, turns=self.turns[:turns])

    def with_stretches(self, stretches: Sequence[KVSpan]) -> Session:
        """Return the session with its spans replaced; they are assigned to turns by their numbers of tokens."""
        given, turns = list(stretches), list[Turn]()
        for turn in self.turns:
            mine: list[KVSpan] = []
            while given and sum(len(each.tokens) for each in mine) < turn.n_tokens:
                mine.append(given.pop(0))
            turns.append(replace(turn, stretches=tuple(mine)))
        return replace(self, turns=tuple(turns))

    def as_dict(self) -> dict[str, Any]:
        """Return the session in plain JSON types."""
        turns = [
            {
                "messages": [asdict(message) for message in turn.messages],
                "said": list(turn.said),
                "stretches": [
                    {"tokens": list(each.tokens), "key": str(each.key), "kept": [list(span) for span in each.kept]}
                    for each in turn.stretches
                ],
            }
            for turn in self.turns
        ]
        return {"version": VERSION, "id": self.id, "turns": turns}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Session | None:
        """Read the result of `as_dict`; return None for another version, or a dict that is not a session."""
        try:
            if found["version"] != VERSION:
                return None
            return cls(str(found["id"]), tuple(_exchange(turn) for turn in found["turns"]))
        except (KeyError, TypeError, ValueError, IndexError):
            return None


def _exchange(found: Mapping[str, Any]) -> Turn:
    stretches = tuple(map(_stretch, found["stretches"]))
    return Turn(tuple(map(_message, found["messages"])), tuple(map(int, found["said"])), stretches)


def _stretch(found: Mapping[str, Any]) -> KVSpan:
    kept = tuple((int(lo), int(hi)) for lo, hi in found["kept"])
    return KVSpan(tuple(map(int, found["tokens"])), ChunkKey.parse(found["key"]), kept)


def _message(found: Mapping[str, Any]) -> HistoryMessage:
    parts = tuple((str(text), str(kind), str(source)) for text, kind, source in found["parts"])
    calls = tuple(ToolCall(c["name"], c["arguments"], c["id"]) for c in found["tool_calls"])
    return HistoryMessage(
        found["role"], parts, calls, found["tool_call_id"], found["name"], str(found.get("reasoning", ""))
    )


def truncated(stretches: Sequence[KVSpan], room: int, window: int, ratio: float, sinks: int = 0) -> tuple[KVSpan, ...]:
    """Drop the earliest tokens of a history until at most `room` tokens are left (AttentionStore 3.4).

    Tokens are dropped in steps of `ratio * window`, so that the next turns fit too. Keys do not change.

    Args:
        stretches: The history's spans.
        room: Most tokens that are left.
        window: Tokens of the context window.
        ratio: The share of the window that one step drops, 0..1.
        sinks: How many first tokens always stay (attention sinks).

    Returns:
        The spans; unchanged if they fit already. More than `room` tokens are left only where sinks need them.
    """
    past = sum(stretch.n_kept for stretch in stretches)
    if past <= room:
        return tuple(stretches)
    step = max(1, int(ratio * window))
    count = min(max(0, past - sinks), step * -(-(past - room) // step))
    left, at = list[KVSpan](), 0
    for stretch in stretches:
        lo, hi = max(sinks, at), min(sinks + count, at + stretch.n_kept)
        left.append(stretch.without(lo - at, hi - lo) if lo < hi else stretch)
        at += stretch.n_kept
    return tuple(left)


def matched(stretches: Sequence[KVSpan], token_ids: Sequence[int]) -> tuple[KVSpan, ...]:
    """Return the first spans, as many as equal the first of `token_ids`; at least one id stays unmatched."""
    at, count = 0, 0
    ids = tuple(token_ids)
    for stretch in stretches:
        if at + len(stretch.tokens) >= len(ids) or ids[at : at + len(stretch.tokens)] != stretch.tokens:
            break
        at, count = at + len(stretch.tokens), count + 1
    return tuple(stretches[:count])


def agreed(
    session: Session,
    given: Sequence[HistoryMessage],
    matches: Callable[[HistoryMessage, HistoryMessage], bool] = is_same,
) -> Session:
    """Return the session with its first turns, as many as the given messages begin with.

    Args:
        session: The session.
        given: The messages of a new question.
        matches: Whether a given message is the stored one.
    """
    left = list(given)
    for count, turn in enumerate(session.turns):
        mine, left = left[: len(turn.messages)], left[len(turn.messages) :]
        if len(mine) < len(turn.messages) or not all(map(matches, mine, turn.messages)):
            return session.upto(count)
    return session


def names_of(session: Session) -> dict[ChunkKey, str]:
    """Return for each span's key the name of its turn, such as "turn 2", for traces."""
    return {stretch.key: f"turn {number}" for number, turn in enumerate(session.turns, 1) for stretch in turn.stretches}


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
        omitted: Where whole turns were left out: the row before which they stood, and their tokens. There is no history
            then.
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
        for stretch in self.history:
            yield from ((lo, hi, stretch) for lo, hi in stretch.kept)
