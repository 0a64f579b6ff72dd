"""Prompt building: turn messages or a text into a prompt of tokens with chunks and positions.

`text.chunks` finds chunks and `text.assemble` places them; the builder gives them the model's tokenizer and chat
template, the tenant's keys, and the known texts from the store's catalog.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Integral
from types import MappingProxyType
from typing import Any

from cachetools import LRUCache

from ragfuse.engine.ask import Ask
from ragfuse.engine.context_window import check_messages, check_texts, may_fit
from ragfuse.engine.options import ends_of
from ragfuse.engine.question import ChatInput, Ids, is_bare_text, is_ids, messages_of
from ragfuse.engine.runtime import Runtime
from ragfuse.errors import InputError, StoreError
from ragfuse.process.exit import EXITING, start_thread
from ragfuse.settings import Settings
from ragfuse.store import KnownText
from ragfuse.store.catalog import Catalog
from ragfuse.store.deletion import LEARNT
from ragfuse.text.altered import altered
from ragfuse.text.assemble import Assembler
from ragfuse.text.call_probe import call_format
from ragfuse.text.chat_messages import ChatMessage, Content
from ragfuse.text.chunks import KnownChunks, Marker, Piece, chunk_id, pieces
from ragfuse.text.fit import ShortenedContents, drop_last_chunks
from ragfuse.text.known_spans import MAX_SPANS, MIN_ALTERED_TOKENS, KnownSpans, Match
from ragfuse.text.retrieved_documents import RetrievedDocuments
from ragfuse.text.tool_calls import CallFormat
from ragfuse.types.prompt import Prompt
from ragfuse.types.reasons import CODE
from ragfuse.types.request_limits import MAX_RETRIEVED

__all__ = ["PromptBuilder"]

log = logging.getLogger("ragfuse.engine")

PARTS_PROBE = "probed-words"
NO_MORE: Mapping[str, Any] = MappingProxyType({})


class PromptBuilder:
    """Builds the prompts of one engine. Thread-safe.

    Args:
        settings: The shortest chunk, and whether chunks are encoded after filler text.
        catalog: Where the texts of known chunks are kept.
        runtime: The model and tenant; the model may be loaded at first use.

    Attributes:
        marker: Signs and recognises the marks around chunks.
    """

    def __init__(self, settings: Settings, catalog: Catalog, runtime: Runtime) -> None:
        self._settings, self._catalog, self._runtime = settings, catalog, runtime
        self._lock = threading.Lock()
        self._known: KnownChunks | None = None
        self._is_read = False
        shortest = max(6, settings.min_chunk_tokens)
        self._spans = KnownSpans(shortest, max(MIN_ALTERED_TOKENS, shortest))
        self._retrieved = RetrievedDocuments(settings.min_chunk_tokens, lambda text: self._runtime.model.tokens(text))
        self._read_texts: LRUCache[str, bool] = LRUCache(MAX_SPANS)
        self._calls: CallFormat | None = None
        self._in_parts: dict[str, bool] = {}  # by role, whether the template takes contents as lists of parts
        self.marker = Marker(self._secret())

    def known(self, digest: str) -> KnownChunks:
        """Return the known chunks of a tenant, for which prompts are searched; they are read from the catalog once."""
        with self._lock:
            self._known = known = self._known or KnownChunks()
            if not self._is_read:
                self._is_read, texts = self._catalog.try_texts(digest)
                for text in texts or ():
                    if text.text not in known:  # else it has the source that brought it first
                        known.add([text.text], text.source)
                if texts:
                    start_thread("index", self._read, texts)
            return known

    def note(self, digest: str, text: str, source: str, tokens: Sequence[int], must: bool = False) -> None:
        """Add a known chunk, in this process and, if it has text, in the catalog for other processes.

        The catalog is written first, so that a chunk it rejects as invalid is not known here either.

        Args:
            digest: The tenant's digest.
            text: The chunk's text; "" where only its ids are known.
            source: Where the text came from.
            tokens: Its token ids.
            must: Whether a catalog that cannot be written is an error; otherwise only this process knows the chunk.

        Raises:
            StoreError: The catalog cannot be written, and `must` is True.
        """
        if text:
            catalog = self._catalog.strict if must else self._catalog
            try:
                catalog.add_texts(digest, [(str(self._runtime.encoder.key(tokens)), text, source)])
            except StoreError:
                self._remember(digest, text, source, tokens)
                raise
        self._remember(digest, text, source, tokens)

    def _remember(self, digest: str, text: str, source: str, tokens: Sequence[int]) -> None:
        """Add a known chunk in this process only; one that is known keeps the source that brought it first."""
        known = self.known(digest)
        is_known = bool(text) and text in known
        self._spans.add(tokens, text, known.source_of(text) or source)
        self._retrieved.discard(tokens)
        if text and not is_known:
            known.add([text], source)

    def note_retrieved(self, digest: str, texts: Iterable[tuple[str, str]], question: ChatInput | Ids) -> None:
        """Search prompts for these retrieved documents from now on, in this process only.

        A document that is encoded later is added with `note`, for other processes too. One that is not in the question
        verbatim is searched for by its token ids only. Searching for one takes as long as reading the question, so only
        the first `MAX_RETRIEVED` are used.

        Args:
            digest: The tenant's digest.
            texts: (text, source) of the documents.
            question: The question they were retrieved for.
        """
        known, contents = self.known(digest), _contents(question)
        for text, source in islice(texts, MAX_RETRIEVED):
            text = text.strip()
            if text in known or not may_fit(text, self._runtime.model):
                continue
            if self._retrieved.add(text, source, self._spans) and text in contents:
                known.add([text], source)
                self._note_read(text)

    def forget(self, digest: str, texts: Iterable[str]) -> set[tuple[int, ...]]:
        """Forget these texts and the passages learnt from them, in this process; return the passages' token ids."""
        self._read([each for each in self._catalog.texts(digest) if each.source == LEARNT])
        passages = dict[tuple[int, ...], str]()
        for text in texts:
            ids = self._runtime.model.tokens(text.strip())
            shared = (*self._spans.sharing(ids, LEARNT), *self._spans.sharing(ids, CODE))
            passages |= {span.tokens: span.text for span in shared}
            self._drop(ids, text.strip())
        for run, passage in passages.items():
            self._drop(run, passage)
        self.known(digest).discard([chunk_id(text) for text in (*texts, *filter(None, passages.values()))])
        return set(passages)

    def _drop(self, ids: Sequence[int], text: str) -> None:
        self._spans.discard(ids)
        self._retrieved.discard(ids, text)
        with self._lock:
            self._read_texts.pop(text, None)

    def known_from(self, digest: str, source: str) -> list[str]:
        """Return the known texts of a source, including those that other processes have added.

        Raises:
            StoreError: The catalog cannot be read.
        """
        return [each.text for each in self._catalog.strict.texts(digest) if each.source == source]

    @property
    def calls(self) -> CallFormat:
        """The format in which the model writes tool calls, probed once from its chat template."""
        if self._calls is None:
            model, tokenizer = self._runtime.model, self._runtime.model.tokenizer
            own = [str(token) for token in tokenizer.added_tokens_decoder.values()]
            self._calls = call_format(self.render, own, [tokenizer.decode([end]) for end in ends_of(model)])
        return self._calls

    def prompt(
        self,
        question: ChatInput | Ids,
        digest: str,
        tools: Sequence[Mapping[str, Any]] = (),
        leave_out: int = 0,
        ask: Ask | None = None,
        check: bool = False,
    ) -> Prompt:
        """Build a prompt. Its chunks are the marked texts, and every known chunk found in a text.

        Without reuse (`ask.reuse`) it is the model's own prompt, which marks do not change.

        Args:
            question: A text, messages or token ids.
            digest: The tenant's digest.
            tools: Tools that the prompt describes.
            leave_out: How many of the last chunks are left out (`text.fit`).
            ask: The question's options.
            check: Whether a text that can never fit is refused before it is tokenised.

        Raises:
            InputError: The question is not valid.
            OverlongError: `check` is True, and the prompt can never fit.
        """
        ask, model, settings = ask or Ask(), self._runtime.model, self._settings
        shortest, context = settings.min_chunk_tokens, self._runtime.encoder.context
        render: Callable[..., str] | None = None
        if getattr(model.tokenizer, "chat_template", None):
            render = partial(self.render, goes_on=ask.continue_final_message, more=ask.chat_template_kwargs)
        assembler = Assembler(
            tokenizer=model.encoder,
            key_of=self._runtime.encoder.key,
            render=render,
            min_tokens=shortest,
            min_chunk_tokens=shortest,
            context=context,
            find=self._find,
            as_one_text=not ask.reuse,
            continues_last=ask.continue_final_message,
            check=self._check_text if check else lambda text: None,
        )
        if is_ids(question) and not tools and not ask.continue_final_message:
            return assembler.ids(_checked(question, len(model.tokenizer)))
        if isinstance(question, str) and is_bare_text(question, ask, tools):
            shortened = drop_last_chunks([self.pieces(question, digest)], leave_out)
            if check:
                self._check([ChatMessage("user", shortened.contents[0])], shortened, (), is_text=True)
            return replace(assembler.text(shortened.contents[0], model.bos), dropped=shortened.sources)
        messages = messages_of(question)
        last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
        shortened = drop_last_chunks(
            [self.pieces(message.content, digest) for message in messages], leave_out, last_user
        )
        messages = [
            replace(message, content=content) for message, content in zip(messages, shortened.contents, strict=True)
        ]
        if ask.continue_final_message and (messages[-1].role != "assistant" or not messages[-1].has_content):
            raise InputError(
                "continue_final_message needs a last message of role 'assistant' with text; the last one has role "
                f"'{messages[-1].role}'. Add the begun answer, or leave the option out.",
                "continue_final_message",
            )
        if check:
            self._check(messages, shortened, tools)
        return replace(replace(assembler, calls=self.calls).chat(messages, tools), dropped=shortened.sources)

    def _check_text(self, text: str) -> None:
        """Raise OverlongError for a rendered prompt that can never fit.

        Checked again after rendering, as some templates keep white space that others strip.
        """
        check_texts([text], self._runtime.model)

    def _check(
        self,
        messages: Sequence[ChatMessage],
        shortened: ShortenedContents,
        tools: Sequence[Mapping[str, Any]],
        is_text: bool = False,
    ) -> None:
        n_omitted = len(shortened.sources)
        what = f"The prompt without the {n_omitted} chunks that could be left out" if n_omitted else "The prompt"
        check_messages(messages, self._runtime.model, tools, what=what, is_text=is_text, may_drop=not shortened.sources)

    def pieces(self, content: Content, digest: str) -> Sequence[Piece]:
        """Return a message's content cut into chunks and fresh text; pieces in a list stay as they are."""
        if isinstance(content, str):
            found = pieces(content, self.marker, self.known(digest))
            for piece in found:
                if piece.found:
                    self._read([KnownText("", piece.text, piece.source)])
            return found
        parts = ((part,) if isinstance(part, Piece) else self.pieces(part, digest) for part in content)
        return [piece for part in parts for piece in part]

    def altered(self, question: ChatInput | Ids, documents: Sequence[tuple[str, str]]) -> str:
        """Return how a question alters its retrieved documents so that none is found in it; "" where it does not."""
        return altered(_contents(question), [text for text, _ in documents])

    def _find(self, ids: Sequence[int]) -> list[Match]:
        """Return where known chunks and retrieved documents occur in token ids."""
        return self._retrieved.find(ids, self._spans.find(ids))

    def _read(self, texts: Iterable[KnownText]) -> None:
        """Search prompts for the token ids of these texts too, which finds them altered or in part."""
        for text in texts:
            if EXITING.is_set():
                return
            if not self._note_read(text.text):
                self._spans.add(self._runtime.model.tokens(text.text), text.text, text.source)

    def _note_read(self, text: str) -> bool:
        """Mark a text as tokenised, and return whether it was before."""
        with self._lock:
            was_read = bool(self._read_texts.get(text))
            self._read_texts[text] = True
            return was_read

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] = NO_MORE,
        goes_on: bool = False,
    ) -> str:
        """Return the text of messages as the chat template renders them.

        Args:
            messages: Messages in OpenAI's form.
            tools: Tools that the template describes.
            add_generation_prompt: Whether to add the template's generation prompt, which makes the model answer.
            more: Variables of the template.
            goes_on: Leave the last message open, so that the answer continues it; no generation prompt is added.
        """
        forms = [self._in_template_form(message) for message in messages]
        ending = {"continue_final_message": True} if goes_on else {"add_generation_prompt": add_generation_prompt}
        return self._rendered(forms, tools, {**more, **ending})

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> str:
        tokenizer, given = self._runtime.model.tokenizer, [dict(tool) for tool in tools] or None
        return str(tokenizer.apply_chat_template(messages, tools=given, tokenize=False, **more))

    def _in_template_form(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with its content in the form that the template renders: a text, or a list of parts."""
        content, role = message.get("content"), str(message.get("role"))
        if not isinstance(content, str):
            return dict(message)
        role = role if role in ("system", "assistant", "user") else "user"
        if role not in self._in_parts:
            self._in_parts[role] = self._takes_parts(role)
        return {**message, "content": [{"type": "text", "text": content}] if self._in_parts[role] else content}

    def _takes_parts(self, role: str) -> bool:
        """Return whether the template renders contents of this role only where they are lists of parts."""
        others = [] if role == "user" else [self._in_template_form({"role": "user", "content": "Why?"})]
        for content, is_list in ((PARTS_PROBE, False), ([{"type": "text", "text": PARTS_PROBE}], True)):
            message = {"role": role, "content": content}
            try:
                text = self._rendered([message, *others] if role == "system" else [*others, message], (), {})
            except Exception:  # a template may raise anything
                continue
            if PARTS_PROBE in text:
                return is_list
        return False

    def _secret(self) -> bytes:
        """Return the key that signs marks; all processes on one store share it."""
        new = {"secret": secrets.token_hex(32)}
        return bytes.fromhex(self._catalog.settle("marker", new)["secret"])


def _checked(ids: Ids, n_ids: int) -> list[int]:
    """Return token ids as ints; raise InputError for an id that the tokenizer does not have."""
    unknown = next((id for id in ids if not isinstance(id, Integral) or not 0 <= id < n_ids), None)
    if unknown is not None:
        raise InputError(
            f"Token ids are whole numbers from 0 to {n_ids - 1:,}, found {unknown!r:.80}. Encode the prompt with the "
            "model's own tokenizer."
        )
    return [int(id) for id in ids]


def _contents(question: ChatInput | Ids) -> str:
    """Return all text of a question; "" for token ids."""
    if is_ids(question):
        return ""
    return "\n".join(text for message in messages_of(question) for text in _texts(message.content))


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) else [each if isinstance(each, str) else each.text for each in content]
