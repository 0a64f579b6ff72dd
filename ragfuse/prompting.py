"""One engine's prompts: which texts are known as chunks, and messages or a text as tokens with chunks and positions.

What is a chunk is told in `text.chunks`, where it is placed in `text.assemble`; this brings them the model's tokenizer
and template, the tenant's keys, and the texts that the store's book keeps.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragfuse.asking import ends_of
from ragfuse.core import ChunkKey, Prompt, amid
from ragfuse.errors import InputError
from ragfuse.gate import Booked
from ragfuse.hf.model import HFModel
from ragfuse.settings import Settings
from ragfuse.store import KnownText
from ragfuse.text.altered import altered
from ragfuse.text.assemble import Assembler
from ragfuse.text.call_probe import call_format
from ragfuse.text.calls import CallFormat
from ragfuse.text.chunks import KnownChunks, Marker, Piece, chunk_id, pieces
from ragfuse.text.fit import lean
from ragfuse.text.known_spans import ALTERED, MOST, KnownSpans, Match
from ragfuse.text.nodes import Request
from ragfuse.text.turns import Content, Turn

__all__ = ["Content", "Inquiry", "Prompter", "Question", "Turn"]

ENOUGH = 0.75
"""Share of a new document that known ones have to say, for it to be taken from them and not encoded itself."""
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
        self._is_read = False
        shortest = max(6, settings.min_chunk_tokens)
        self._spans = KnownSpans(shortest, max(ALTERED, shortest))
        self._heard = KnownSpans(shortest, max(ALTERED, shortest))  # what nobody encoded yet
        self._read_texts = set[str]()
        self._calls: CallFormat | None = None
        self.marker = Marker(self._secret())

    def known(self, digest: str) -> KnownChunks:
        """The texts of a tenant's chunks that a prompt is searched for; read from the book once."""
        with self._lock:
            self._known = known = self._known or KnownChunks()
            if not self._is_read:
                self._is_read, texts = self._booked.asked(lambda book: list(book.texts(digest)))
                for text in texts or ():
                    known.add([text.text], text.source)
                if texts:
                    threading.Thread(target=self._read, args=(texts,), name="ragfuse-index", daemon=True).start()
            return known

    def note(self, digest: str, text: str, source: str, tokens: Sequence[int], must: bool = False) -> None:
        """From now on this is a known chunk, here and, unless it has no text, in later processes.

        Where the book cannot be written, this process alone knows it; that is a StoreError if it `must` be.
        """
        self._spans.add(tokens, text, source)
        self._heard.discard(tokens)
        if not text:
            return
        known = self.known(digest)
        if text not in known:
            known.add([text], source)
        ask = self._booked.strictly if must else self._booked
        ask(lambda book: book.add_texts(digest, [(str(self._key(tokens)), text, source)]), None)

    def hear(self, digest: str, texts: Iterable[tuple[str, str]], question: Question) -> None:
        """Look for these (text, source) in prompts from now on, in this process. Whoever encodes one notes it.

        One that does not stand in the question as it is is looked for by its ids alone, of which there are so many.
        """
        known, contents = self.known(digest), _contents(question)
        for text, source in texts:
            text = text.strip()
            if text in known or len(ids := self._model().tokens(text)) < self._settings.min_chunk_tokens:
                continue
            if text in contents:
                known.add([text], source)
                self._read_texts.add(text)
            if ids not in self._spans:
                self._heard.add(ids, text, source)

    def forget(self, digest: str, texts: Iterable[str]) -> None:
        """These texts are no known chunks any more, in this process."""
        self.known(digest).discard([chunk_id(text) for text in texts])
        for text in texts:
            ids = self._model().tokens(text.strip())
            self._spans.discard(ids)
            self._heard.discard(ids)
            self._read_texts.discard(text.strip())

    def known_from(self, digest: str, source: str) -> list[str]:
        """Known texts of this source, also those that another process has noted since; StoreError where the book cannot
        be read."""
        found: list[str] = self._booked.strictly(
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
        shortest, context = settings.min_chunk_tokens, amid("") if settings.amid_tokens else ""
        if isinstance(question, str) and not tools:
            plain = Assembler(model.tokens, self._key, None, shortest, shortest, context, find=self._find)
            left = lean([self.pieces(question, digest)], leave_out)
            return replace(plain.text(left.contents[0], model.bos), dropped=left.sources)
        turns = turns_of(question)
        asked = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
        left = lean([self.pieces(turn.content, digest) for turn in turns], leave_out, asked)
        turns = [replace(turn, content=content) for turn, content in zip(turns, left.contents, strict=True)]
        render = self.render if getattr(model.words, "chat_template", None) else None
        known = context, self.calls, self._find
        chat = Assembler(model.tokens, self._key, render, shortest, shortest, *known)
        return replace(chat.chat(turns, tools), dropped=left.sources)

    def pieces(self, content: Content, digest: str) -> Sequence[Piece]:
        """A text, or the texts of a list, cut into chunks and fresh text; pieces stay as they are."""
        if isinstance(content, str):
            found = pieces(content, self.marker, self.known(digest))
            for piece in found:
                if piece.found and piece.text not in self._read_texts:
                    self._read([KnownText("", piece.text, piece.source)])
            return found
        parts = ((part,) if isinstance(part, Piece) else self.pieces(part, digest) for part in content)
        return [piece for part in parts for piece in part]

    def altered(self, question: Question, documents: Sequence[tuple[str, str]]) -> str:
        """How a question holds documents that were retrieved for it, where none of them is found in it; "": not so."""
        return altered(_contents(question), [text for text, _ in documents])

    def _find(self, ids: Sequence[int]) -> list[Match]:
        """Where known chunks stand in ids. What was only heard of has no KV yet: it counts where those that have some
        say less than `ENOUGH` of it."""
        found = self._spans.find(ids)
        for new in self._heard.find(ids) if len(self._heard) else ():
            held = sum(max(0, min(each.hi, new.hi) - max(each.lo, new.lo)) for each in found)
            if held < ENOUGH * (new.hi - new.lo):
                found = [*(part for each in found for part in _outside(each, new)), new]
        return sorted(found, key=lambda match: match.lo)

    def _read(self, texts: Iterable[KnownText]) -> None:
        """Look for the ids of these texts, too: they are found where a prompt holds them altered, or in part."""
        if len(self._spans) >= MOST:
            self._read_texts.clear()  # some of them were dropped for others
        for text in texts:
            if text.text not in self._read_texts:
                self._spans.add(self._model().tokens(text.text), text.text, text.source)
                self._read_texts.add(text.text)

    def render(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = (), ask: bool = True) -> str:
        """Messages as the chat template writes them; ask: with what makes the model answer."""
        words, given = self._model().words, [dict(tool) for tool in tools] or None
        return str(words.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=ask))

    def _secret(self) -> bytes:
        """What signs marks: the same in every process on one store."""
        new = {"secret": secrets.token_hex(32)}
        return bytes.fromhex(self._booked(lambda book: book.settle("marker", new), new)["secret"])


def _outside(match: Match, new: Match) -> Iterator[Match]:
    """What of a match stands outside another one."""
    for lo, hi in ((match.lo, min(match.hi, new.lo)), (max(match.lo, new.hi), match.hi)):
        if lo < hi:
            yield replace(match, lo=lo, hi=hi, row=match.row + lo - match.lo)


def _contents(question: Question) -> str:
    """All that a question says, as one text."""
    return "\n".join(text for turn in turns_of(question) for text in _texts(turn.content))


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) else [each if isinstance(each, str) else each.text for each in content]


def turns_of(question: Question) -> list[Turn]:
    """The messages; InputError if there are none."""
    messages = [Turn("user", question)] if isinstance(question, str) else list(question)
    if not messages:
        raise InputError("There are no messages; wanted at least one, such as ('user', 'a question').")
    return [each if isinstance(each, Turn) else Turn(*each) for each in messages]
