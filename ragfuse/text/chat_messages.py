"""Messages of a conversation, with texts, chunks and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from ragfuse.errors import InputError
from ragfuse.types.answer import ToolCall


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message's content: fresh text or one chunk.

    Args:
        text: The text.
        kind: "chunk" if KV of the text is to be reused, else "fresh".
        source: Where a chunk's text came from, for display only.
        ids: The generated token ids, if the piece is a whole answer. Empty if unknown.
    """

    text: str
    kind: Literal["fresh", "chunk"] = "fresh"
    source: str = ""
    ids: tuple[int, ...] = ()


Content = str | Sequence[str | Piece]
"""A message's content: a text, or a list of texts and pieces."""

ROLE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"developer": "system", "function": "tool", "model": "assistant", "chatbot": "assistant"}
)
"""The role name that chat templates use, by the role name of another interface."""


@dataclass(frozen=True)
class ChatMessage:
    """A message for the chat template.

    Args:
        role: "system", "user", "assistant", or "tool" for a tool's result.
        content: The text, or texts and pieces.
        tool_calls: Tool calls that the assistant makes.
        tool_call_id: In a tool's result, the id of the tool call. Otherwise "".
        name: In a tool's result, the name of the tool. Otherwise "".
        reasoning: The assistant's reasoning before its answer, for templates that render it.
    """

    role: str
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def text(self) -> str:
        """The texts of all parts of the content, as one string."""
        return "".join(
            part if isinstance(part, str) else part.text for part in _parts(self.content)
        )

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The non-empty parts of the content, as pieces."""
        pieces = (Piece(part) if isinstance(part, str) else part for part in _parts(self.content))
        return tuple(piece for piece in pieces if piece.text)

    @staticmethod
    def conversation(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
        """Normalise messages for a chat template.

        Roles get the template's names (`ROLE_ALIASES`), a tool's result gets the name of the called
        tool, and adjacent messages of one role are merged (`joined`).

        Raises:
            InputError: No message has text or a tool call.
        """
        found: list[ChatMessage] = []
        names: dict[str, str] = {}
        for message in messages:
            role = ROLE_ALIASES.get(message.role, message.role)
            name = message.name or (names.get(message.tool_call_id, "") if role == "tool" else "")
            names |= {call.id: call.name for call in message.tool_calls}
            found.append(replace(message, role=role, name=name))
        found = ChatMessage.joined(found)
        if not any(message.tool_calls or message.text.strip() for message in found):
            raise InputError("All messages are empty. At least one needs text or a tool call.")
        return found

    @staticmethod
    def joined(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
        """Merge adjacent messages of one role, as templates require. Tool results stay separate."""
        found: list[ChatMessage] = []
        for role, group in groupby(messages, key=lambda message: message.role):
            group_messages = list(group)
            if role == "tool" or len(group_messages) == 1:
                found += group_messages
                continue
            content: list[str | Piece] = []
            for message in group_messages:
                if message.content:
                    content += (
                        ["\n", *_parts(message.content)] if content else _parts(message.content)
                    )
            calls = tuple(call for message in group_messages for call in message.tool_calls)
            thoughts = "\n".join(
                message.reasoning for message in group_messages if message.reasoning
            )
            found.append(ChatMessage(role, content, calls, reasoning=thoughts))
        return found


def turn_begins(messages: Sequence[ChatMessage]) -> tuple[int, list[int]]:
    """Return the number of leading system messages, and the index of each turn after the first.

    To shorten a conversation, drop the messages between the system messages and one of the indices.
    """
    head = next(
        (at for at, message in enumerate(messages) if message.role != "system"), len(messages)
    )
    later = range(head + 1, len(messages))
    return head, [at for at in later if messages[at].role == "user" != messages[at - 1].role]


def _parts(content: Content) -> Sequence[str | Piece]:
    return [content] if isinstance(content, str) else content
