"""One message of a conversation, with the calls of tools that it makes or answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ragfuse.core import ToolCall
from ragfuse.text.chunks import Piece

Content = str | Sequence[str | Piece]
"""Of a message: text in which marked and known chunks are found, or a list of texts and pieces."""


@dataclass(frozen=True)
class Turn:
    """A message for the chat template. `tool_calls` are an assistant's; `tool_call_id`, `name` say what a tool answers.

    The role of a tool's result is "tool".
    """

    role: str
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def says_something(self) -> bool:
        """Whether it holds more than white space, or calls tools."""
        texts = (part if isinstance(part, str) else part.text for part in _listed(self.content))
        return bool(self.tool_calls) or any(text.strip() for text in texts)

    @staticmethod
    def joined(turns: Iterable[Turn]) -> list[Turn]:
        """These turns, neighbours of one role as one: a chat template may want roles to alternate.

        What tools returned stays apart, each by the call that it answers.
        """
        found: list[Turn] = []
        for turn in turns:
            if found and turn.role == found[-1].role != "tool":
                before = found.pop()
                between = ["\n"] if before.content and turn.content else []
                content = [*_listed(before.content), *between, *_listed(turn.content)]
                turn = Turn(turn.role, content, before.tool_calls + turn.tool_calls)
            found.append(turn)
        return found


def later_turns(messages: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Messages without their first turns, one more each time; what the system says first stays, and the last turn."""
    head = next((at for at, turn in enumerate(messages) if turn.role != "system"), len(messages))
    for at in range(head + 1, len(messages)):
        if messages[at].role == "user" != messages[at - 1].role:
            yield [*messages[:head], *messages[at:]]


def _listed(content: Content) -> Sequence[str | Piece]:
    return [content] if isinstance(content, str) else content
