"""Reads the events of a streamed answer: its pieces as they come, and at the end the whole `Answer` with its trace."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from ragfuse.engine.answer_stream import Piece
from ragfuse.errors import InputError, ServerError
from ragfuse.types.answer import Answer, Ended, Thought, ToolCall, Trace

ENDS = ("stop", "length", "tool_calls")
MAX_CALLS = 1024
"""Most tool calls of one answer."""


class AnswerReader:
    """Joins the events of one answer, and checks the type of everything in them.

    Args:
        is_chat: Whether the events are those of `/v1/chat/completions`; else of `/v1/completions`.
    """

    def __init__(self, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._texts, self._thoughts = list[str](), list[str]()
        self._calls: tuple[ToolCall, ...] = ()
        self._token_ids: tuple[int, ...] = ()
        self._ended: Ended | None = None
        self._trace: Trace | None = None

    def read(self, event: dict[str, Any]) -> Iterator[Piece]:
        """Yield the pieces of text and reasoning in an event; raise ServerError for anything that is no answer."""
        for choice in _listed(event.get("choices"), "choices"):
            delta = choice.get("delta") if self._is_chat else {"content": choice.get("text")}
            if not isinstance(delta, dict):
                raise _wrong("delta", delta)
            if thought := _text(delta.get("reasoning_content"), "reasoning_content"):
                self._thoughts.append(thought)
                yield Thought(thought)
            if text := _text(delta.get("content"), "content"):
                self._texts.append(text)
                yield text
            if delta.get("tool_calls") is not None:
                self._calls += tuple(_call(each) for each in _listed(delta["tool_calls"], "tool_calls"))
                if len(self._calls) > MAX_CALLS:
                    raise _wrong("tool_calls", f"{len(self._calls)} calls")
            if choice.get("token_ids") is not None:
                self._token_ids = _ids(choice["token_ids"])
            if choice.get("finish_reason") is not None:
                self._end(choice["finish_reason"], event.get("ragfuse"))

    @property
    def answer(self) -> Answer:
        """The whole answer; raises ServerError where the events had no end."""
        if self._ended is None or self._trace is None:
            raise _wrong("the end of the stream", "no finish_reason before it")
        text, reasoning = "".join(self._texts), "".join(self._thoughts)
        return Answer(text, self._token_ids, self._ended, self._trace, self._calls, reasoning)

    def _end(self, reason: Any, trace: Any) -> None:
        if reason not in ENDS:
            raise _wrong("finish_reason", reason)
        try:
            self._trace = self._traces.validate_python(trace)
        except ValidationError:
            raise _wrong("ragfuse", trace) from None
        self._ended = cast(Ended, reason)

    @cached_property
    def _traces(self) -> TypeAdapter[Trace]:
        return TypeAdapter(Trace)


def _listed(found: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _wrong(what, found)
    return found


def _text(found: Any, what: str) -> str:
    if found is not None and not isinstance(found, str):
        raise _wrong(what, found)
    return found or ""


def _ids(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in found):
        raise _wrong("token_ids", found)
    return tuple(found)


def _call(found: dict[str, Any]) -> ToolCall:
    if not isinstance(found.get("function"), dict):
        raise _wrong("tool_calls", found)
    try:
        return ToolCall.from_openai(found)
    except InputError:
        raise _wrong("tool_calls", found) from None


def _wrong(what: str, found: Any) -> ServerError:
    return ServerError(
        f"The server's answer has a wrong value at '{what}': found {found!r:.80}; wanted what `ragfuse serve` of this "
        "version sends. Check base_url=, and that client and server have one version."
    )
