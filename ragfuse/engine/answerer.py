"""What programs ask: an `Engine` in their process, or a `RemoteEngine` that passes everything on to a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.engine.ask import Ask
from ragfuse.engine.question import Question
from ragfuse.schemas.nodes import Schema
from ragfuse.settings import Settings
from ragfuse.types.answer import Answer
from ragfuse.types.ingested import Ingested
from ragfuse.types.model_card import ModelCard

Progress = Callable[[Ingested], None]


class Registration(Protocol):
    """A schema that was registered."""

    @property
    def name(self) -> str:
        """The name by which prompts refer to it."""
        ...

    @property
    def done(self) -> Ingested:
        """The counts of its encoding."""
        ...


class Registrar(Protocol):
    """Where the schemas of prompts in PML are registered."""

    def has(self, schema: Schema) -> bool:
        """Return whether an equal schema is registered and encoded."""
        ...

    def ensure(self, schema: Schema, progress: Progress | None = None) -> Registration | None:
        """Register a schema unless it is registered already; None where it was."""
        ...

    def register(self, schema: Any, progress: Progress | None = None) -> Registration:
        """Register a schema and encode its modules."""
        ...


class Answerer(Protocol):
    """What answers prompts and reuses the KV of their chunks. `Engine` documents each member."""

    @property
    def card(self) -> ModelCard:
        """The model's name, window and limits."""
        ...

    @property
    def settings(self) -> Settings:
        """All settings of an engine in this process."""
        ...

    @property
    def digest(self) -> str:
        """The digest of model and tenant."""
        ...

    @property
    def schemas(self) -> Registrar:
        """The registered schemas."""
        ...

    def answer(self, prompt: Question, ask: Ask | None = None) -> Answer:
        """Return the answer to a prompt."""
        ...

    def stream(self, prompt: Question, ask: Ask | None = None) -> AnswerStream:
        """Return the answer as it is generated."""
        ...

    def batch(
        self, prompts: Sequence[Question], ask: Ask | None = None, cancelled: threading.Event | None = None
    ) -> list[Answer]:
        """Return the answers to several prompts."""
        ...

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text in the middle of a prompt."""
        ...

    def count_tokens(self, prompt: Question, tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return the number of tokens of a prompt."""
        ...

    def ingest(
        self, texts: Iterable[tuple[str, str]], prefix: Sequence[int] = (), progress: Progress | None = None
    ) -> Ingested:
        """Encode chunks ahead of questions."""
        ...

    def prefix(self, prompt: Question, ask: Ask | None = None) -> tuple[int, ...]:
        """Return the ids before the first chunk of a prompt."""
        ...

    def know(self, texts: Iterable[tuple[str, str]]) -> None:
        """Recognise chunks in prompts from now on."""
        ...

    def prefetch(self, texts: Iterable[str]) -> None:
        """Start copying the KV of these chunks to memory."""
        ...

    def forget(self, texts: Iterable[str]) -> int:
        """Delete the KV of these chunks; return the bytes freed."""
        ...
