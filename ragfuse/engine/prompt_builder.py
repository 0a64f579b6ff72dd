"""Build prompts: turn messages or a text into tokens with chunks and positions.

`text.assemble` tokenises a prompt and finds chunks in the prompt's ids. The builder supplies the
model's tokenizer and chat template, the tenant's keys, and the index of known chunks. Known chunks
come from the store's catalog and from questions.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from numbers import Integral

from cachetools import LRUCache

from ragfuse.engine.ask import Ask, Ids, is_ids
from ragfuse.engine.request import Request
from ragfuse.engine.runtime import Runtime, ids_of
from ragfuse.errors import InputError
from ragfuse.process.jobs import EXITING, start_thread
from ragfuse.store import KnownText
from ragfuse.store.deletion import LEARNT
from ragfuse.text.assemble import Assembler
from ragfuse.text.chat_messages import ChatMessage, Content, Piece
from ragfuse.text.chat_template import ChatTemplate
from ragfuse.text.known_spans import MIN_ALTERED_TOKENS, KnownSpans
from ragfuse.types.keys import digest as digest_of
from ragfuse.types.plan import CODE
from ragfuse.types.prompt import Prompt

__all__ = ["PromptBuilder"]

MAX_READ_TEXTS = 1 << 16
"""Maximum number of remembered digests of indexed texts."""
ANCHOR_CHARS = 24
"""A text that is not indexed yet is found in prompts by its first `ANCHOR_CHARS` characters."""


class PromptBuilder:
    """Builds the prompts of one engine. Thread-safe.

    Args:
        runtime: Provides the tenant, the catalog with the texts of known chunks, and the model,
            which is loaded on first use.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._settings, self._catalog, self.runtime = runtime.settings, runtime.catalog, runtime
        self._lock = threading.Lock()
        self._is_loaded = False
        # texts that are not yet in the index, by their first characters
        self._unread: Mapping[str, Sequence[KnownText]] = {}
        shortest = max(6, runtime.settings.min_chunk_tokens)
        self._spans = KnownSpans(shortest, max(MIN_ALTERED_TOKENS, shortest))
        self._read_texts: LRUCache[str, bool] = LRUCache(MAX_READ_TEXTS)  # by digest

    def knows(self, text: str, tokens: Sequence[int]) -> bool:
        """Return whether a text with these token ids is already a known chunk."""
        self._load(text)
        return tokens in self._spans

    def note(self, text: str, source: str, tokens: Sequence[int], must: bool = False) -> None:
        """Add a known chunk to the index, and to the catalog if `text` is not empty.

        A chunk that is already known keeps its first source.

        Args:
            text: The chunk's text; "" if only its ids are known.
            source: The text's source.
            tokens: The chunk's token ids.
            must: True to raise StoreError if the catalog cannot be written. If False, a chunk
                that cannot be written is known only to this process.

        Raises:
            StoreError: The catalog cannot be written, and `must` is True.
        """
        self._load(text)
        self._spans.add(tokens, text, source)
        if text:
            catalog = self._catalog.strict if must else self._catalog
            key = str(self.runtime.encoder.key(tokens))
            catalog.add_texts(self.runtime.digest, [(key, text, source)])

    def forget(self, texts: Iterable[str]) -> set[tuple[int, ...]]:
        """Forget texts, and passages learnt from them. Return the token ids of these passages."""
        for each in self._catalog.texts(self.runtime.digest):
            if each.source == LEARNT:
                self._index(each.text, LEARNT)
        forgotten = {text.strip(): self.runtime.model.tokens(text.strip()) for text in texts}
        passages = self._spans.sharing(list(forgotten.values()), (LEARNT, CODE))
        for text, ids in (*forgotten.items(), *((each.text, each.tokens) for each in passages)):
            self._spans.discard(ids)
            with self._lock:
                self._read_texts.pop(digest_of(text), None)
        return {each.tokens for each in passages}

    # the index

    def _load(self, text: str) -> None:
        """Index the catalog's chunks in `text` now, and all other chunks in the background."""
        with self._lock:
            if not self._is_loaded:
                self._is_loaded, texts = self._catalog.tried(
                    lambda file: file.texts(self.runtime.digest)
                )
                unread = defaultdict[str, list[KnownText]](list)
                for each in texts or ():
                    unread[each.text[:ANCHOR_CHARS]].append(each)
                self._unread = unread
                if texts:
                    start_thread("index", self._read_all, texts)
            unread_now = self._unread
        if unread_now:
            anchors = {text[at : at + ANCHOR_CHARS] for at in range(len(text))}
            for each in chain.from_iterable(
                unread_now[anchor] for anchor in anchors & unread_now.keys()
            ):
                if each.text in text:
                    self._index(each.text, each.source)

    def _read_all(self, texts: Iterable[KnownText]) -> None:
        for each in texts:
            if EXITING.is_set():
                return
            self._index(each.text, each.source)
        with self._lock:
            self._unread = {}

    def _index(self, text: str, source: str, is_stored: bool = True) -> None:
        """Add a text to the index; a text that was added before is not tokenised again."""
        text = text.strip()
        name = digest_of(text)
        with self._lock:
            if self._read_texts.get(name):
                return
        ids = ids_of(text, self.runtime.model)
        if len(ids) >= self._settings.min_chunk_tokens:
            self._spans.add(ids, text, source, is_stored)
        with self._lock:
            self._read_texts[name] = True

    # prompts

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return ChatTemplate(self.runtime.model.tokenizer)

    @cached_property
    def _assembler(self) -> Assembler:
        model, encoder = self.runtime.model, self.runtime.encoder
        shortest, context = self._settings.min_chunk_tokens, encoder.context
        return Assembler(
            model.text_encoder, self.template, self._spans, encoder.key, shortest, context
        )

    def prompt(
        self,
        request: Request,
        messages: Sequence[ChatMessage] | None = None,
    ) -> Prompt:
        """Build a prompt. Known chunks that occur in the prompt's token ids become segments.

        Args:
            request: The question, its options and tools.
            messages: Messages that replace the question's messages. None means no replacement.

        Raises:
            InputError: The question is not valid.
        """
        question, ask, model = request.question, request.ask, self.runtime.model
        messages = request.messages if messages is None else messages
        documents = self._taken(messages, ask) if ask.reuse else []
        if not request.is_chat and is_ids(question):
            return self._assembler.ids(_checked(question, len(model.tokenizer)), documents)
        if not request.is_chat:
            return self._assembler.text(messages[0].text, model.bos, documents)
        more = ask.chat_template_kwargs
        return self._assembler.chat(messages, request.tools, more, documents)

    def _taken(self, messages: Sequence[ChatMessage], ask: Ask) -> list[tuple[str, str]]:
        """Index the chunks and documents given with a question; return (text, source) of each."""
        self._load("\n".join(message.text for message in messages))
        pieces = chain.from_iterable(message.pieces for message in messages)
        given = [(piece.text, piece.source) for piece in pieces if piece.kind == "chunk"]
        for text, source in [*given, *(ask.documents if self._settings.learn != "off" else ())]:
            self._index(text, source, is_stored=False)
        return [*ask.documents, *given]

    def pieces(self, content: Content) -> Sequence[Piece]:
        """Cut the content of a message into known chunks and fresh text."""
        given = ChatMessage("user", content).pieces
        parts = (
            [each] if each.kind == "chunk" or each.ids else self._cut(each.text) for each in given
        )
        return [piece for piece in chain.from_iterable(parts) if piece.text]

    def _cut(self, text: str) -> Iterator[Piece]:
        encoder, at = self.runtime.model.text_encoder, 0
        ids, offsets = encoder.read(text, encoder.control_spans(text))
        for chunk in self._spans.find(ids):
            known = chunk.text
            lo = text.find(
                known,
                max(at, offsets[chunk.start][0] - len(known)),
                offsets[chunk.stop - 1][1] + len(known),
            )
            if known and lo >= 0:
                yield Piece(text[at:lo])
                yield Piece(known, "chunk", chunk.source)
                at = lo + len(known)
        yield Piece(text[at:])


def _checked(ids: Ids, n_ids: int) -> list[int]:
    unknown = next((id for id in ids if not isinstance(id, Integral) or not 0 <= id < n_ids), None)
    if unknown is not None:
        raise InputError(
            f"Token ids must be whole numbers from 0 to {n_ids - 1:,}, found {unknown!r:.80}."
            " Encode the prompt with the model's own tokenizer."
        )
    return [int(id) for id in ids]
