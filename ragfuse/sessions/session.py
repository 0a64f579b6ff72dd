"""Conversations as values: a name, turns, and where the KV of their tokens is stored. No I/O.

Truncation only changes which stored rows a prompt uses, and at which position they start. The
stored bytes stay the same (AttentionStore 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ragfuse.store.radix import Rows
from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.types.keys import ChunkKey

VERSION = 4
"""Version of a stored session; other versions are ignored."""


def _content(message: ChatMessage) -> tuple[object, ...]:
    text = message.text.strip() if message.role == "assistant" else message.text
    calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    return message.role, text, calls, message.name


def is_same(given: ChatMessage, stored: ChatMessage) -> bool:
    """Return whether two messages have the same content."""
    return _content(given) == _content(stored)


def is_again(given: ChatMessage, stored: ChatMessage) -> bool:
    """Return whether `given` is the message `stored`, sent again.

    A user's message may lack the chunks retrieved for it, if these preceded or followed its text.
    If it has chunks, they must equal the stored ones: with other chunks it is another question.
    """
    if is_same(given, stored):
        return True
    if given.role != "user" or _has_chunks(given.pieces):
        return False
    pieces = stored.pieces
    own = [at for at, piece in enumerate(pieces) if piece.kind == "fresh" and piece.text.strip()]
    inside = pieces[own[0] : own[-1] + 1] if own else ()
    if not own or _has_chunks(inside) or len(inside) == len(pieces):
        return False
    text = "".join(piece.text for piece in inside)
    return is_same(
        replace(given, content=given.text.strip()), replace(stored, content=text.strip())
    )


def _has_chunks(pieces: Sequence[Piece]) -> bool:
    return any(piece.kind == "chunk" for piece in pieces)


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Args:
        messages: The new messages. The last one is the answer. Unless it calls tools, it keeps its
            generated ids, because tokenising its text may give other ids.
    """

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Session:
    """A conversation: its name, its turns, and where its KV is stored. Immutable; each turn creates
    a new value.

    Args:
        id: Its name.
        turns: Its turns.
        tokens: All token ids, including those that prompts no longer use.
        rows: Where the KV of these tokens is stored, in order, without tokens in `left_out`.
        left_out: The truncated range lo:hi of tokens, which prompts no longer use.
    """

    id: str
    turns: tuple[Turn, ...] = ()
    tokens: tuple[int, ...] = ()
    rows: tuple[Rows, ...] = ()
    left_out: tuple[int, int] = (0, 0)

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All messages, including answers."""
        return tuple(message for turn in self.turns for message in turn.messages)

    @property
    def n_tokens(self) -> int:
        """Number of tokens, including those that prompts no longer use."""
        return len(self.tokens)

    @property
    def dropped(self) -> int:
        """Number of tokens that prompts no longer use."""
        return self.left_out[1] - self.left_out[0]

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """The keys of all its KV."""
        return tuple(dict.fromkeys(rows.key for rows in self.rows))

    def known(self, token_ids: Sequence[int]) -> tuple[Rows, ...]:
        """Return the stored `Rows` of a prompt's prefix: whole ones, never with its last token."""
        pairs = enumerate(zip(self.tokens, token_ids, strict=False))
        most = min(len(self.tokens), len(token_ids) - 1)
        n_common = next((at for at, (mine, theirs) in pairs if mine != theirs), most)
        return tuple(takewhile(lambda rows: rows.hi <= min(n_common, most), self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Return the session in plain JSON types."""
        fields: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return {"version": VERSION, **fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Session | None:
        """Parse the result of `as_dict`; None if it has another version or is damaged."""
        try:
            return _adapter().validate_python(fields) if fields.get("version") == VERSION else None
        except ValidationError:
            return None


@cache
def _adapter() -> TypeAdapter[Session]:
    return TypeAdapter(Session)


def truncated(
    left_out: tuple[int, int], n_past: int, max_tokens: int, step: int, sinks: int = 0
) -> tuple[int, int]:
    """Return the tokens of a history to leave out, so that at most `max_tokens` remain
    (AttentionStore 3.4).

    The earliest tokens are dropped in steps, so that the next turns fit too.

    Args:
        left_out: The range lo:hi that is already left out.
        n_past: Number of tokens of the history, including that range.
        max_tokens: Maximum tokens that remain.
        step: Number of tokens that one step drops.
        sinks: Number of first tokens that always stay (attention sinks).

    Returns:
        The range; unchanged if the history already fits. More than `max_tokens` tokens remain only
        if the sinks alone exceed it.
    """
    lo, hi = left_out
    excess = n_past - (hi - lo) - max_tokens
    if excess <= 0:
        return left_out
    first = min(sinks, n_past, *([lo] if lo < hi else []))
    n_dropped = hi - lo + step * -(-excess // step)
    return first, min(n_past, first + n_dropped)


def agreed(session: Session, given: Sequence[ChatMessage]) -> Session:
    """Return the session with only the first turns, those that the messages `given` repeat."""
    rest = list(given)
    for count, turn in enumerate(session.turns):
        sent, rest = rest[: len(turn.messages)], rest[len(turn.messages) :]
        if len(sent) < len(turn.messages) or not all(map(is_again, sent, turn.messages)):
            return replace(session, turns=session.turns[:count])
    return session


@dataclass(frozen=True)
class PendingTurn:
    """The turn of a conversation that is being answered.

    Args:
        session: The conversation with the earlier turns that the question continues.
        messages: The new messages.
        version: Version of the stored session; 0 for a new one.
        previous_keys: Keys of the stored session's KV, before this turn.
        left_out: (index in the prompt, token ids): the tokens left out before that index.
    """

    session: Session
    messages: tuple[ChatMessage, ...]
    version: int = 0
    previous_keys: tuple[ChunkKey, ...] = ()
    left_out: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def id(self) -> str:
        """The session's name."""
        return self.session.id
