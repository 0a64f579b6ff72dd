"""One message of a conversation, with the calls of tools that it makes or answers."""

from __future__ import annotations

from collections.abc import Sequence
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
