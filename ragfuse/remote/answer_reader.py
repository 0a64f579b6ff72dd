"""Reads the events of a streamed answer: its pieces as they come, and at the end the whole `Answer`
with its trace.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from ragfuse.engine.answer_stream import Piece
from ragfuse.errors import InputError, ServerError
from ragfuse.types.answer import Answer, Thought, ToolCall, Trace

TRACE = TypeAdapter(Trace)


class AnswerReader:
    """Joins the events of one answer, and checks what is in them."""

    def __init__(self) -> None:
        self._texts, self._thoughts = list[str](), list[str]()
        self._calls: tuple[ToolCall, ...] = ()
        self._last: dict[str, Any] = {}

    def read(self, event: dict[str, Any]) -> Piece | None:
        """Return the piece of text or reasoning in an event, if there is one; raise ServerError for
        anything that is no answer.
        """
        try:
            (choice,) = event["choices"]
            delta = choice.get("delta", {})
            self._calls += tuple(map(ToolCall.from_openai, delta.get("tool_calls", ())))
            if choice["finish_reason"] is not None:
                self._last = {**choice, "trace": TRACE.validate_python(event["ragfuse"])}
            if thought := delta.get("reasoning_content"):
                self._thoughts.append("" + thought)
                return Thought(thought)
            text = delta.get("content") or choice.get("text") or ""
            self._texts.append("" + text)
        except (ValueError, LookupError, TypeError, AttributeError, InputError) as error:
            raise _wrong(repr(error)) from None
        return text or None

    @property
    def answer(self) -> Answer:
        """The whole answer; raises ServerError where the events had no end."""
        if not self._last:
            raise _wrong("it broke off before finish_reason and trace")
        return Answer(
            "".join(self._texts),
            tuple(self._last["token_ids"]),
            self._last["finish_reason"],
            self._last["trace"],
            self._calls,
            "".join(self._thoughts),
        )


def _wrong(found: str) -> ServerError:
    return ServerError(
        f"The server's answer cannot be read: {found:.300}. Check base_url=, that client and server"
        " have one version, and the server's log."
    )
