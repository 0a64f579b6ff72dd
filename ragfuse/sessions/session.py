"""Conversations as immutable values: name, turns, and where the tokens' KV is stored. No I/O.

Truncation only changes which stored rows a prompt uses, and the positions of these rows. The stored
bytes do not change (AttentionStore 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ragfuse.store.radix import Rows
from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.types.keys import ChunkKey

VERSION = 4
"""Format version of stored sessions. A session of another version is read as an empty session."""


def _content(message: ChatMessage) -> tuple[object, ...]:
    text = message.text.strip() if message.role == "assistant" else message.text
    calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    return message.role, text, calls, message.name


def is_same(given: ChatMessage, stored: ChatMessage) -> bool:
    """Return whether two messages have equal roles, texts, tool calls and names."""
    return _content(given) == _content(stored)


def is_again(given: ChatMessage, stored: ChatMessage) -> bool:
    """Return whether `given` is the message `stored`, sent again.

    If `given` is a user message without chunks, the chunks that precede or follow the user's text
    in `stored` are ignored. Any other message must equal `stored`.
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
    """One turn of a conversation: a question and its answer.

    Args:
        messages: The new messages; the last message is the answer. An answer without tool calls
            includes the generated ids, because tokenising the answer's text may give other ids.
    """

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Session:
    """A conversation: its name, its turns, and where its KV is stored. Each turn creates a new
    `Session`.

    Args:
        id: The name of the conversation.
        turns: The turns, oldest first.
        tokens: The token ids of all turns, including truncated tokens.
        rows: The store entries with the KV of `tokens`, in order. Truncated tokens have no `Rows`.
        left_out: The range lo:hi of truncated tokens, which prompts no longer contain.
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
        """Number of tokens, including truncated tokens."""
        return len(self.tokens)

    @property
    def dropped(self) -> int:
        """Number of truncated tokens, which prompts no longer contain."""
        return self.left_out[1] - self.left_out[0]

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """The keys of all entries with KV of the conversation."""
        return tuple(dict.fromkeys(rows.key for rows in self.rows))

    def known(self, token_ids: Sequence[int]) -> tuple[Rows, ...]:
        """Return the stored `Rows` that a prompt begins with.

        The prompt's last token is never included. `Rows` that the prompt contains only in part are
        left out.
        """
        pairs = enumerate(zip(self.tokens, token_ids, strict=False))
        most = min(len(self.tokens), len(token_ids) - 1)
        n_common = next((at for at, (mine, theirs) in pairs if mine != theirs), most)
        return tuple(takewhile(lambda rows: rows.hi <= min(n_common, most), self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Return the session in plain JSON types."""
        fields: dict[str, Any] = _SESSION.dump_python(self, mode="json")
        return {"version": VERSION, **fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Session | None:
        """Parse the result of `as_dict`. Return None for damaged fields or another version."""
        try:
            return _SESSION.validate_python(fields) if fields.get("version") == VERSION else None
        except ValidationError:
            return None


_SESSION = TypeAdapter(Session)


def truncated(
    left_out: tuple[int, int], n_past: int, max_tokens: int, step: int, sinks: int = 0
) -> tuple[int, int]:
    """Return the range of tokens to truncate, so that at most `max_tokens` tokens of a history
    remain (AttentionStore 3.4).

    The earliest tokens after the sinks are dropped in large steps, so that the next turns fit too.

    Args:
        left_out: The range lo:hi that is already truncated.
        n_past: Number of tokens of the history, including the range `left_out`.
        max_tokens: Maximum tokens that remain.
        step: Number of tokens that one step drops.
        sinks: Number of first tokens that always stay (attention sinks).

    Returns:
        The range lo:hi to truncate, which is `left_out` if the history already fits. If there are
        more sinks than `max_tokens`, more than `max_tokens` tokens remain.
    """
    lo, hi = left_out
    excess = n_past - (hi - lo) - max_tokens
    if excess <= 0:
        return left_out
    first = min(sinks, n_past, *([lo] if lo < hi else []))
    n_dropped = hi - lo + step * -(-excess // step)
    return first, min(n_past, first + n_dropped)


def agreed(session: Session, given: Sequence[ChatMessage]) -> Session:
    """Return the session, reduced to its leading turns whose messages are repeated in `given`."""
    rest = list(given)
    for count, turn in enumerate(session.turns):
        sent, rest = rest[: len(turn.messages)], rest[len(turn.messages) :]
        if len(sent) < len(turn.messages) or not all(map(is_again, sent, turn.messages)):
            return replace(session, turns=session.turns[:count])
    return session


@dataclass(frozen=True)
class PendingTurn:
    """A turn that is being answered, with the conversation to which it belongs.

    Args:
        session: The conversation, reduced to the stored turns that precede the question.
        messages: The new messages.
        version: Version of the stored session; 0 for a new session.
        previous_keys: Keys of the stored session's KV before this turn.
        left_out: (index, ids). Truncation removed `ids`, starting at token `index` of the prompt.
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
