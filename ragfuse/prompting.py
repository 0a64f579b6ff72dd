"""One engine's prompts: which texts are known as chunks, and messages or a text as tokens with chunks and positions.

What is a chunk is told in `text.chunks`, where it is placed in `text.assemble`; this brings them the model's tokenizer
and template, the tenant's keys, and the texts that the store's book keeps.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragfuse.asking import ends_of
from ragfuse.core import ChunkKey, Prompt
from ragfuse.errors import InputError
from ragfuse.gate import Booked
from ragfuse.hf.model import HFModel
from ragfuse.settings import Settings
from ragfuse.store import KnownText
from ragfuse.text.assemble import Assembler
from ragfuse.text.call_probe import call_format
from ragfuse.text.calls import CallFormat
from ragfuse.text.chunks import KnownChunks, Marker, Piece, chunk_id, pieces
from ragfuse.text.fit import lean
from ragfuse.text.nodes import Request
from ragfuse.text.turns import Content, Turn

__all__ = ["Content", "Inquiry", "Prompter", "Question", "Turn"]

Question = str | Sequence[tuple[str, Content] | Turn]
"""What is asked: one text, or messages for the chat template, each a (role, content) or a turn."""
Inquiry = Question | Request
"""What an engine answers: a question, or a prompt in PML, which it binds to the modules of its schema."""


class Prompter:
    """Makes prompts for one model and tenant. Thread-safe; `model` may load it when it is first called."""

    def __init__(
        self, settings: Settings, booked: Booked, model: Callable[[], HFModel], key: Callable[..., ChunkKey]
    ) -> None:
        self._settings, self._booked, self._model, self._key = settings, booked, model, key
        self._lock = threading.Lock()
        self._known: KnownChunks | None = None
        self._calls: CallFormat | None = None
        self.marker = Marker(self._secret())

    def known(self, digest: str) -> KnownChunks:
        """The texts of a tenant's chunks that a prompt is searched for; read from the book once."""
        with self._lock:
            if self._known is None:
                self._known = KnownChunks()
                texts: list[KnownText] = self._booked(lambda book: list(book.texts(digest)), [])
                for text in texts:
                    self._known.add([text.text], text.source)
            return self._known

    def note(self, digest: str, text: str, source: str, tokens: Sequence[int]) -> None:
        """From now on this text is a known chunk, here and in later processes."""
        known = self.known(digest)
        if text not in known:
            known.add([text], source)
        self._booked(lambda book: book.add_texts(digest, [(str(self._key(tokens)), text, source)]), None)

    def forget(self, digest: str, texts: Iterable[str]) -> None:
        """These texts are no known chunks any more, in this process."""
        self.known(digest).discard([chunk_id(text) for text in texts])

    def known_from(self, digest: str, source: str) -> list[str]:
        """Known texts of this source, also those that another process has noted since."""
        found: list[str] = self._booked(
            lambda book: [each.text for each in book.texts(digest) if each.source == source], []
        )
        return found

    @property
    def calls(self) -> CallFormat:
        """How the model writes calls of tools, found once."""
        if self._calls is None:
            model, words = self._model(), self._model().words
            own = [str(token) for token in words.added_tokens_decoder.values()]
            self._calls = call_format(self.render, own, [words.decode([end]) for end in ends_of(model)])
        return self._calls

    def prompt(
        self, question: Question, digest: str, tools: Sequence[Mapping[str, Any]] = (), leave_out: int = 0
    ) -> Prompt:
        """Tokens, chunks and positions. Chunks are what carries marks, and every known chunk that stands in a text.

        The last `leave_out` chunks are left out, see `text.fit`.
        """
        model, settings = self._model(), self._settings
        shortest, has_amid = settings.min_chunk_tokens, settings.amid_tokens > 0
        if isinstance(question, str) and not tools:
            plain = Assembler(model.tokens, self._key, None, shortest, shortest, has_amid)
            left = lean([self.pieces(question, digest)], leave_out)
            return replace(plain.text(left.contents[0], model.bos), dropped=left.sources)
        turns = turns_of(question)
        asked = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
        left = lean([self.pieces(turn.content, digest) for turn in turns], leave_out, asked)
        turns = [replace(turn, content=content) for turn, content in zip(turns, left.contents, strict=True)]
        render = self.render if getattr(model.words, "chat_template", None) else None
        chat = Assembler(model.tokens, self._key, render, shortest, shortest, has_amid, self.calls)
        return replace(chat.chat(turns, tools), dropped=left.sources)

    def pieces(self, content: Content, digest: str) -> Sequence[Piece]:
        """A text, or the texts of a list, cut into chunks and fresh text; pieces stay as they are."""
        if isinstance(content, str):
            return pieces(content, self.marker, self.known(digest))
        parts = ((part,) if isinstance(part, Piece) else self.pieces(part, digest) for part in content)
        return [piece for part in parts for piece in part]

    def render(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = (), ask: bool = True) -> str:
        """Messages as the chat template writes them; ask: with what makes the model answer."""
        words, given = self._model().words, [dict(tool) for tool in tools] or None
        return str(words.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=ask))

    def _secret(self) -> bytes:
        """What signs marks: the same in every process on one store."""
        new = {"secret": secrets.token_hex(32)}
        return bytes.fromhex(self._booked(lambda book: book.settle("marker", new), new)["secret"])


def turns_of(question: Question) -> list[Turn]:
    """The messages; InputError if there are none."""
    messages = [Turn("user", question)] if isinstance(question, str) else list(question)
    if not messages:
        raise InputError("There are no messages; wanted at least one, such as ('user', 'a question').")
    return [each if isinstance(each, Turn) else Turn(*each) for each in messages]
