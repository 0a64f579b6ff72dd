"""One message of a conversation, with the calls of tools that it makes or answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ragfuse.text.chunks import Piece
from ragfuse.types.answer import ToolCall

Content = str | Sequence[str | Piece]
"""Of a message: text in which marked and known chunks are found, or a list of texts and pieces."""


@dataclass(frozen=True)
class ChatMessage:
    """A message for the chat template. `tool_calls` are an assistant's; `tool_call_id`, `name` say what a tool answers.

    The role of a tool's result is "tool". reasoning: what an assistant thought before its answer, for templates that
    write it.
    """

    role: str
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def says_something(self) -> bool:
        """Whether it holds more than white space, or calls tools."""
        texts = (part if isinstance(part, str) else part.text for part in _listed(self.content))
        return bool(self.tool_calls) or any(text.strip() for text in texts)

    @staticmethod
    def joined(turns: Iterable[ChatMessage]) -> list[ChatMessage]:
        """These turns, neighbours of one role as one: a chat template may want roles to alternate.

        What tools returned stays apart, each by the call that it answers.
        """
        found: list[ChatMessage] = []
        for role, group in groupby(turns, key=lambda turn: turn.role):
            alike = list(group)
            if role == "tool" or len(alike) == 1:
                found += alike
                continue
            content: list[str | Piece] = []
            for turn in alike:
                if turn.content:
                    content += ["\n", *_listed(turn.content)] if content else _listed(turn.content)
            calls = tuple(call for turn in alike for call in turn.tool_calls)
            thoughts = "\n".join(turn.reasoning for turn in alike if turn.reasoning)
            found.append(ChatMessage(role, content, calls, reasoning=thoughts))
        return found


class LaterMessages:
    """Messages without their first turns, one more each time; what the system says first stays, and the last turn.

    Each list is made when it is asked for: all of them together would be as large as the messages squared.
    """

    def __init__(self, messages: Sequence[ChatMessage]) -> None:
        head = next((at for at, turn in enumerate(messages) if turn.role != "system"), len(messages))
        begins = range(head + 1, len(messages))
        self._messages, self._head = messages, head
        self._begins = [at for at in begins if messages[at].role == "user" != messages[at - 1].role]

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> list[ChatMessage]:
        return [*self._messages[: self._head], *self._messages[self._begins[index] :]]


def _listed(content: Content) -> Sequence[str | Piece]:
    return [content] if isinstance(content, str) else content
