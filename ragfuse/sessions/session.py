"""A conversation's turns as stretches of tokens, each with the key of its KV. Values only: no model, no store, no I/O.

A stretch is found by its tokens and by what they attended to before themselves, never by where it stands: truncation
changes which of its rows are used and where they start, and no byte (AttentionStore 3.4).
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
"""Of a session as it is written down; others are none."""

Part = tuple[str, str, str]
"""A piece of a message: its text, "fresh", "chunk", or "found" for a chunk that a text holds without saying so, and
where a chunk came from."""


@dataclass(frozen=True)
class HistoryMessage:
    """What one side said, in pieces that are tokenised apart, with the calls of tools that it makes or answers."""

    role: str
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(part[0] for part in self.parts)

    @cached_property
    def digest(self) -> str:
        """The same for messages that say the same; white space around what an assistant said does not count."""
        text = self.text.strip() if self.role == "assistant" else self.text
        calls = [[call.name, dict(call.arguments)] for call in self.tool_calls]
        return digest("message", self.role, text, json.dumps(calls, sort_keys=True), self.name)

    @property
    def has_chunks(self) -> bool:
        """Whether any of its pieces is one."""
        return any(kind != "fresh" for _, kind, _ in self.parts)

    @property
    def bare(self) -> HistoryMessage | None:
        """The message without the chunks around its own text; None where there are none, or some stand inside it."""
        says = [at for at, (text, kind, _) in enumerate(self.parts) if kind == "fresh" and text.strip()]
        inside = replace(self, parts=self.parts[says[0] : says[-1] + 1] if says else ())
        if not says or inside.has_chunks or len(inside.parts) == len(self.parts):
            return None
        return replace(self, parts=((inside.text.strip(), "fresh", ""),))


def prefix_digests(messages: Sequence[HistoryMessage]) -> list[str]:
    """For each message a digest of all up to it: what stands for a conversation's beginning."""
    return list(accumulate((message.digest for message in messages), lambda before, each: digest(before, each)))


def is_same(given: HistoryMessage, said: HistoryMessage) -> bool:
    """Whether two messages say the same."""
    return given.digest == said.digest


def is_again(given: HistoryMessage, said: HistoryMessage) -> bool:
    """Whether a message is one of the same conversation, sent again: the same, or a user's without the chunks that were
    retrieved for it. One that comes with chunks is compared as a whole: other chunks are another question."""
    bare = said.bare if given.role == "user" and not given.has_chunks else None
    if bare is None:
        return is_same(given, said)
    return is_same(given, said) or is_same(replace(given, parts=((given.text.strip(), "fresh", ""),)), bare)


@dataclass(frozen=True)
class KVSpan:
    """Token ids in a row that share an entry of KV. kept: which of them a prompt still has, as lo:hi in order."""

    tokens: tuple[int, ...]
    key: ChunkKey
    kept: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, tokens: Sequence[int], key: ChunkKey) -> KVSpan:
        """A stretch of which nothing is dropped."""
        return cls(tuple(tokens), key, ((0, len(tokens)),))

    @property
    def n_kept(self) -> int:
        """Tokens that a prompt still has."""
        return sum(hi - lo for lo, hi in self.kept)

    def without(self, first: int, count: int) -> KVSpan:
        """Without `count` of its kept tokens, from the `first` of these on."""
        left: list[tuple[int, int]] = []
        at = 0
        for lo, hi in self.kept:
            spans = ((lo, min(hi, lo + max(0, first - at))), (max(lo, min(hi, lo + first + count - at)), hi))
            left += [span for span in spans if span[0] < span[1]]
            at += hi - lo
        return replace(self, kept=tuple(left))


@dataclass(frozen=True)
class Turn:
    """One turn: the messages that were new in it, the answer as the last of them, and the stretches they made.

    said: the ids that the answer was generated as, which tokenising its text again may not give.
    """

    messages: tuple[HistoryMessage, ...]
    said: tuple[int, ...]
    stretches: tuple[KVSpan, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens of its stretches, kept or not."""
        return sum(len(stretch.tokens) for stretch in self.stretches)


@dataclass(frozen=True)
class Session:
    """A conversation: its name and its turns. It is never changed; the next turn makes another one."""

    id: str
    turns: tuple[Turn, ...] = ()

    @property
    def messages(self) -> tuple[HistoryMessage, ...]:
        """All messages, answers among them."""
        return tuple(message for turn in self.turns for message in turn.messages)

    @property
    def stretches(self) -> tuple[KVSpan, ...]:
        """Of all turns, in order."""
        return tuple(stretch for turn in self.turns for stretch in turn.stretches)

    @property
    def n_tokens(self) -> int:
        """All its tokens."""
        return sum(turn.n_tokens for turn in self.turns)

    @property
    def dropped(self) -> int:
        """Tokens that prompts no longer have."""
        return self.n_tokens - sum(stretch.n_kept for stretch in self.stretches)

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """Of all its KV, that of dropped tokens too."""
        return tuple(dict.fromkeys(stretch.key for stretch in self.stretches))

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """What stands for its messages at the end of each turn."""
        beginnings = prefix_digests(self.messages)
        return tuple(beginnings[at - 1] for at in accumulate(len(turn.messages) for turn in self.turns))

    def upto(self, turns: int) -> Session:
        """Its first turns alone."""
        return replace(self, turns=self.turns[:turns])

    def with_stretches(self, stretches: Sequence[KVSpan]) -> Session:
        """The same with others in their place, turn by turn by their tokens."""
        given, turns = list(stretches), list[Turn]()
        for turn in self.turns:
            mine: list[KVSpan] = []
            while given and sum(len(each.tokens) for each in mine) < turn.n_tokens:
                mine.append(given.pop(0))
            turns.append(replace(turn, stretches=tuple(mine)))
        return replace(self, turns=tuple(turns))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
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
        """What `as_dict` gave; None where it is of another version, or no session."""
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
    """Stretches without as many of their earliest tokens as it takes for `room` (AttentionStore 3.4).

    Dropped is a share `ratio` of `window` tokens at a time, so that the next turns fit too. The first `sinks` tokens
    stay. Nothing changes where all fit; what cannot be dropped stays. No key changes.
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
    """The longest beginning of these whose tokens begin `token_ids`, of which at least one is left."""
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
    """A session's turns as far as these messages begin with theirs; `matches`: whether one is what was said."""
    left = list(given)
    for count, turn in enumerate(session.turns):
        mine, left = left[: len(turn.messages)], left[len(turn.messages) :]
        if len(mine) < len(turn.messages) or not all(map(matches, mine, turn.messages)):
            return session.upto(count)
    return session


def names_of(session: Session) -> dict[ChunkKey, str]:
    """Of each stretch, whose it is, for people."""
    return {stretch.key: f"turn {number}" for number, turn in enumerate(session.turns, 1) for stretch in turn.stretches}


@dataclass(frozen=True)
class PendingTurn:
    """A conversation that a question goes on with, before it is answered.

    session: its turns so far, those that the question goes on from. messages: those that are new. version: of the
    session as it was read, 0 for a new one; previous_keys: keys of that. persistent: whether it is written down;
    keep_chunks: whether retrieved chunks do. history: the stretches that the prompt begins with, as they are used in
    it. omitted: tokens of turns that were left out as a whole, behind the row before which they stood; then there is no
    history.
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
        """What the prompt has of its history in order: rows lo:hi of a stretch."""
        for stretch in self.history:
            yield from ((lo, hi, stretch) for lo, hi in stretch.kept)
