"""Recorders of an LLM's events and callbacks, and readers of its responses."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.instrumentation.event_handlers import BaseEventHandler


class EventRecorder(BaseEventHandler):
    """A handler that records all events."""

    events: list[Any]

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the handler."""
        return "EventRecorder"

    def handle(self, event: Any, **kwargs: Any) -> None:
        """Record an event."""
        self.events.append(event)

    def kinds(self, call: str) -> list[str]:
        """Return the short names of the events of a call's kind, in order; repeated names in a row
        count once.
        """
        prefix = "LLMChat" if "chat" in call else "LLMCompletion"
        names = [
            event.class_name() for event in self.events if event.class_name().startswith(prefix)
        ]
        short = [name.removeprefix(prefix).removesuffix("Event") for name in names]
        return [name for at, name in enumerate(short) if at == 0 or short[at - 1] != name]


class CallbackRecorder(BaseCallbackHandler):
    """A callback handler that records the starts and ends of LLM calls."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.started: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []

    def on_event_start(
        self, event_type: CBEventType, payload: Any = None, event_id: str = "", **_: Any
    ) -> str:
        """Record the start of a call."""
        if event_type is CBEventType.LLM:
            self.started.append({"id": event_id, **(payload or {})})
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: Any = None, event_id: str = "", **_: Any
    ) -> None:
        """Record the end of a call."""
        if event_type is CBEventType.LLM:
            self.ended.append({"id": event_id, **(payload or {})})

    def start_trace(self, trace_id: str | None = None) -> None:
        """Do nothing."""

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None:
        """Do nothing."""


def text_of(response: Any) -> str:
    """Return the text of a response."""
    return (response.message.content if isinstance(response, ChatResponse) else response.text) or ""


def joined_text(responses: list[Any]) -> str:
    """Return the text of a stream, from its deltas."""
    return "".join(response.delta or "" for response in responses)
