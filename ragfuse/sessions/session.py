"""Conversations as values: a name, turns, and the path of their tokens to the rows that hold their
KV. No I/O.

Truncation only changes which rows a prompt uses and where they start; the stored bytes stay the
same (AttentionStore 3.4).
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
"""Version of the stored form of a session; sessions of other versions are not read."""


def _content(message: ChatMessage) -> tuple[object, ...]:
    text = message.text.strip() if message.role == "assistant" else message.text
    calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    return message.role, text, calls, message.name


def is_same(given: ChatMessage, stored: ChatMessage) -> bool:
    """Return whether two messages have the same content."""
    return _content(given) == _content(stored)


def is_again(given: ChatMessage, stored: ChatMessage) -> bool:
    """Return whether `given` is the message `stored`, sent again.

    A user's message may come without the chunks that were retrieved for it, where these stand
    before and after its own text. If it has chunks they must be the same, as other chunks make it
    another question.
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
        messages: The new messages; the last one is the answer, with the ids that it was generated
            as: tokenising its text may give others.
    """

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Session:
    """A conversation: its name, its turns, and the path of its KV. Immutable; each turn makes a new
    value.

    Args:
        id: Its name.
        turns: Its turns.
        tokens: All its token ids, from the first to the last that is kept.
        rows: Where the KV of these tokens is, in order, without that of the dropped ones.
        left_out: The range lo:hi of the tokens that prompts no longer use, as they were truncated.
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
        """Number of its tokens, dropped ones included."""
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
        """Return the rows that a prompt can begin with; its last id stays unmatched."""
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
        """Read the result of `as_dict`; None for another version or damage."""
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
    """Return which tokens of a history prompts leave out, so that at most `max_tokens` remain
    (AttentionStore 3.4).

    The earliest tokens are dropped in steps, so that the next turns fit too.

    Args:
        left_out: The range lo:hi that is left out already.
        n_past: The history's tokens, those included.
        max_tokens: Maximum tokens that remain.
        step: How many tokens one step drops.
        sinks: How many first tokens always stay (attention sinks).

    Returns:
        The range; unchanged if the history fits already. More than `max_tokens` tokens remain only
        where the sinks alone are more.
    """
    lo, hi = left_out
    excess = n_past - (hi - lo) - max_tokens
    if excess <= 0:
        return left_out
    first = min(sinks, n_past, *([lo] if lo < hi else []))
    n_dropped = hi - lo + step * -(-excess // step)
    return first, min(n_past, first + n_dropped)


def agreed(session: Session, given: Sequence[ChatMessage]) -> Session:
    """Return the session with only the first turns that the messages begin with."""
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
        previous_keys: Keys of the stored session's KV.
        left_out: The row before which the prompt leaves out tokens of the conversation, and these
            tokens.
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
