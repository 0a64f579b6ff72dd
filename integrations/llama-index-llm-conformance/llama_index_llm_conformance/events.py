"""What the conformance suite hears and reads of an LLM: its events, its callbacks, the text of its responses."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.instrumentation.event_handlers import BaseEventHandler


class Heard(BaseEventHandler):
    """Keeps the events of LLM calls."""

    events: list[Any]

    @classmethod
    def class_name(cls) -> str:
        """Its name."""
        return "Heard"

    def handle(self, event: Any, **kwargs: Any) -> None:
        """Keep an event."""
        self.events.append(event)

    def kinds(self, call: str) -> list[str]:
        """The names of a call's events, in order, those of its kind alone; neighbours of one name once."""
        prefix = "LLMChat" if "chat" in call else "LLMCompletion"
        names = [event.class_name() for event in self.events if event.class_name().startswith(prefix)]
        short = [name.removeprefix(prefix).removesuffix("Event") for name in names]
        return [name for at, name in enumerate(short) if at == 0 or short[at - 1] != name]


class Called(BaseCallbackHandler):
    """Keeps what a callback manager tells of LLM calls."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.began: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []

    def on_event_start(self, event_type: CBEventType, payload: Any = None, event_id: str = "", **_: Any) -> str:
        """Keep a beginning."""
        if event_type is CBEventType.LLM:
            self.began.append({"id": event_id, **(payload or {})})
        return event_id

    def on_event_end(self, event_type: CBEventType, payload: Any = None, event_id: str = "", **_: Any) -> None:
        """Keep an end."""
        if event_type is CBEventType.LLM:
            self.ended.append({"id": event_id, **(payload or {})})

    def start_trace(self, trace_id: str | None = None) -> None:
        """Nothing."""

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None:
        """Nothing."""


def text_of(response: Any) -> str:
    """A response's text."""
    return (response.message.content if isinstance(response, ChatResponse) else response.text) or ""


def joined(responses: list[Any]) -> str:
    """What a stream said."""
    return "".join(response.delta or "" for response in responses)


def fingerprint(response: ChatResponse) -> tuple[str, Any]:
    """A response's text and, where it is told, how long its prompt was."""
    raw = response.raw if isinstance(response.raw, dict) else {}
    return text_of(response), raw.get("usage", {}).get("prompt_tokens")
