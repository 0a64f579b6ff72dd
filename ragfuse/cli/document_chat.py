"""A conversation over documents: each turn retrieves chunks, and the KV of all earlier turns is kept in a session.

What is typed and what is printed is `chat`'s.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ragfuse.cli.entries import counted
from ragfuse.cli.prompts import rag_prompt
from ragfuse.errors import InputError

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.answer_stream import AnswerStream
    from ragfuse.engine.answerer import Answerer
    from ragfuse.engine.ask import Ask
    from ragfuse.types.answer import Answer

SHORT_WORDS = 4
"""A question of so few words, such as "And when?", is searched for together with the one before it."""

Messages = list[tuple[str, Any]]
"""(role, content) of each message; a content may have pieces."""


@dataclass
class DocumentChat:
    """What was said, and how the next question is answered.

    Args:
        answerer: Who answers.
        library: The index that chunks are retrieved from.
        how: The options of the next answer; they name the session, for a model that has a chat template.
        messages: What was said in earlier turns.
        has_documents: Whether the index has chunks.
        answer: The last answer; None before the first.
        retrieved: The documents that the last prompt's passages are from.
    """

    answerer: Answerer
    library: Library
    how: Ask
    messages: Messages = field(default_factory=list)
    has_documents: bool = False
    answer: Answer | None = None
    retrieved: Sequence[str] = ()
    _last: Any = None
    _question: str = ""

    def prompt(self, question: str) -> Any:
        """Return the next turn: the question behind the chunks that are retrieved for it."""
        is_short = len(question.split()) <= SHORT_WORDS
        searched = f"{self._question} {question}" if is_short and self._question else question
        self._question = question if not is_short else self._question or question
        chunks = self.library.search(searched) if self.has_documents else []
        self.retrieved = [source for _, source in chunks]
        if not chunks and self.answerer.card.has_chat_template:
            return [("user", question)]
        return rag_prompt(self.answerer, question, chunks)

    @contextlib.contextmanager
    def asking(self, prompt: Any) -> Iterator[AnswerStream]:
        """Yield the answer as it is generated; a turn that is read to its end becomes part of the conversation."""
        with self.answerer.stream(prompt, self.how) as stream:
            yield stream
            answer = stream.answer
        self.answer = answer
        said = [*prompt] if isinstance(prompt, list) else []
        self.messages += [*said, ("assistant", answer.text)]
        self._last = prompt

    def by_full_prefill(self) -> Answer:
        """Return the answer to the last question by full prefill of the whole conversation, which stays as it is.

        Raises:
            InputError: Nothing was asked yet.
        """
        if self.answer is None:
            raise InputError("There is no answer to compare yet. Ask something first.")
        everything = self.messages[:-1] if isinstance(self._last, list) else self._last
        return self.answerer.answer(everything, replace(self.how, reuse=False, session=None))

    def change(self, **options: Any) -> None:
        """Change options of later answers; SettingsError for a value that they cannot have."""
        self.how = replace(self.how, **options)


def new_session() -> str:
    """Return the name of a session that ends with its conversation."""
    return f"chat-{secrets.token_hex(8)}"


def earlier_messages(answerer: Any, session: str) -> Messages:
    """Return what was said in a session of an engine here; [] for a new one, or for a server's."""
    sessions = getattr(answerer, "sessions", None)
    if sessions is None or session not in {info.id for info in sessions.ls()}:
        return []
    return [(message.role, message.text) for message in sessions.show(session).messages]


def common_sources(sources: dict[str, int], most: int = 12) -> Sequence[str]:
    """Return lines that name documents with their chunks, `most` of them at most."""
    lines = [f"{counted(n, 'chunk'):>12}  {source}" for source, n in list(sources.items())[:most]]
    return [*lines, f"... and {len(sources) - most:,} more: /docs all lists them"] if len(sources) > most else lines
