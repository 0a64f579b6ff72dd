"""Reads the events of a streamed answer: its pieces as they come, and at the end the whole `Answer`
with its trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ragfuse.engine.answer_stream import Piece
from ragfuse.errors import InputError, ServerError
from ragfuse.types.answer import Answer, Ended, Thought, ToolCall, Trace


class _Sent(BaseModel):
    model_config = ConfigDict(defer_build=True)


class _SentDelta(_Sent):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _SentChoice(_Sent):
    """A choice of a chat, or of a completion, whose text stands in it."""

    delta: _SentDelta = _SentDelta()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: Ended | None = None


class _SentEvent(_Sent):
    choices: list[_SentChoice]
    ragfuse: Trace | None = None


class AnswerReader:
    """Joins the events of one answer, and checks the type of everything in them."""

    def __init__(self) -> None:
        self._texts, self._thoughts = list[str](), list[str]()
        self._calls: tuple[ToolCall, ...] = ()
        self._token_ids: tuple[int, ...] = ()
        self._ended: Ended | None = None
        self._trace: Trace | None = None

    def read(self, event: dict[str, Any]) -> Iterator[Piece]:
        """Yield the pieces of text and reasoning in an event; raise ServerError for anything that
        is no answer.
        """
        try:
            found = _SentEvent.model_validate(event)
            self._calls += tuple(
                ToolCall.from_openai(call)
                for each in found.choices
                for call in each.delta.tool_calls or ()
            )
        except (ValidationError, InputError) as error:
            raise _wrong(str(error)) from None
        for choice in found.choices:
            if thought := choice.delta.reasoning_content:
                self._thoughts.append(thought)
                yield Thought(thought)
            if text := choice.delta.content or choice.text:
                self._texts.append(text)
                yield text
            if choice.token_ids is not None:
                self._token_ids = choice.token_ids
            if choice.finish_reason is not None:
                self._ended, self._trace = choice.finish_reason, found.ragfuse

    @property
    def answer(self) -> Answer:
        """The whole answer; raises ServerError where the events had no end."""
        if self._ended is None or self._trace is None:
            raise _wrong("it broke off before finish_reason and trace")
        text, reasoning = "".join(self._texts), "".join(self._thoughts)
        return Answer(text, self._token_ids, self._ended, self._trace, self._calls, reasoning)


def _wrong(found: str) -> ServerError:
    return ServerError(
        f"The server's answer cannot be read: {found:.300}. Check base_url=, that client and server"
        " have one version, and the server's log."
    )
