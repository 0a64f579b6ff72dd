"""Build a `Prompt` from messages, a text or ids: tokens, positions and store keys of each segment.

The chat template renders the prompt's text. The text is tokenised as a whole, by the model's own
rules, so the ids do not depend on which chunks are known. Chunks are found in the ids. The planner
later looks up the chunks' KV in the store.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.shared import ALL_CORES
from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.text.chat_template import NO_MORE, Chars, ChatTemplate, Rendered, rendered
from ragfuse.text.known_spans import KnownSpans
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, spelled
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import CODE
from ragfuse.types.prompt import Prompt, Segment

Given = tuple[int, int, tuple[int, ...]]
"""(lo, hi, ids): characters lo:hi of a text have the known token ids `ids`."""
Documents = Sequence[tuple[str, str]]
"""(text, source) of each document that a prompt may contain. Chunks in a document get its source.
Documents with equal texts must be listed in the order of the prompt.
"""
ALONE_CHARS = 1 << 15
"""Prompts of at least this many characters use all cores, so they are tokenised one at a time."""


class Tokenizer(Protocol):
    """The tokenizer methods that prompt building needs. `hf.tokens.TextEncoder` has them."""

    def control_spans(self, text: str) -> Sequence[Chars]:
        """Return the range (lo, hi) of each substring that would become a control token."""
        ...

    def read(
        self, text: str, bare: Sequence[Chars] = (), given: Sequence[Given] = ()
    ) -> tuple[Sequence[int], Sequence[Chars]]:
        """Tokenise a whole prompt.

        Args:
            text: The prompt.
            bare: Characters that look like a control token but must be encoded as text.
            given: Parts of the text with known ids. A part is ignored if a token of the whole text
                crosses either end of the part, or if the known ids decode to other text.

        Returns:
            The ids, and the characters lo:hi of each id.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as if the ids were inside a longer text."""
        ...


@dataclass(frozen=True)
class Assembler:
    """A builder of `Prompt`s from messages, text or ids, for one model.

    A chunk is a known run of tokens. The prompt may contain the whole run or a part. Each chunk
    becomes a segment. The segment's key depends on `context`, but not on the chunk's place in the
    prompt. The text before the first chunk becomes the prefix segment if it has at least
    `min_tokens` tokens. All other segments are fresh. A chunk at the very end of the prompt is
    fresh too, because at least the last token must be computed.

    Args:
        tokenizer: The model's tokenizer.
        template: The model's chat template.
        spans: The index of known runs of tokens.
        key_of: `key_of(ids, context)` returns the key of the ids' KV. Context "" means that the
            ids were encoded alone.
        min_tokens: Minimum number of tokens of a reused prefix.
        context: The `ChunkKey.context` in the keys of chunks.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    spans: KnownSpans
    key_of: Callable[[tuple[int, ...], str], ChunkKey]
    min_tokens: int
    context: str

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] = NO_MORE,
        documents: Documents = (),
    ) -> Prompt:
        """Return the Prompt of a conversation, rendered by the chat template.

        Only the template can write control tokens. A word in messages, tool calls or tools that
        looks like a control token is encoded as ordinary text.

        Args:
            messages: The conversation.
            tools: JSON schemas of tools. If the template does not render tools, a message
                describes the tools.
            more: Further variables for the template.
            documents: The documents that the conversation may contain.

        Raises:
            InputError: The model has no chat template, or the template rejects the messages.
        """
        if not self.template.source:
            raise InputError(
                "This model has no chat template. Pass one text instead of messages or tools."
            )
        turns = [replace(each, content=each.pieces) for each in messages]
        if self.template.calls is DEFAULT_CALL_FORMAT:  # the template writes no calls itself
            turns, tools = spelled(turns, tools), ()
        try:
            found = self._rendered(turns, tools, more)
        except InputError:  # the template rejects or drops a system message
            if not any(turn.role == "system" for turn in turns):
                raise
            turns = _without_system(turns)
            found = self._rendered(turns, tools, more)
        given = list[Given]()
        for turn, chars in zip(turns, found.contents, strict=True):
            if chars is not None and len(turn.pieces) == 1:
                given += self._given(found.text, chars[0], turn.pieces[0].ids)
        core = turns[-1].text.strip()
        at = found.text.rfind(core)
        last = found.contents[-1] or (at, at + len(core))
        asked = last if turns[-1].role == "user" and core else (0, 0)
        return self._of(found, asked, documents, given)

    def text(self, text: str, bos: Sequence[int] = (), documents: Documents = ()) -> Prompt:
        """Return the Prompt of the ids `bos` followed by a text. No chat template is applied."""
        found = Rendered(text, tuple(self.tokenizer.control_spans(text)))
        return self._of(found, (0, len(text)), documents, (), bos)

    def ids(self, ids: Sequence[int], documents: Documents = ()) -> Prompt:
        """Return the Prompt of exactly these token ids. Known chunks in the ids become segments."""
        return self._prompt(tuple(ids), (0, len(ids)), documents)

    def _rendered(
        self,
        turns: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any],
    ) -> Rendered:
        def write(messages: list[dict[str, Any]], schemas: list[Any]) -> str:
            try:
                return self.template.render(messages, schemas, more=more)
            except Exception as error:  # a template may raise anything
                raise InputError(
                    "The chat template does not accept messages with the roles"
                    f" {[turn.role for turn in turns]} ({error}). Change the roles or their order,"
                    " or pass one text instead of messages."
                ) from error

        messages = list(map(self.template.calls.message, turns))
        return rendered(write, messages, tools, self.tokenizer.control_spans)

    def _given(self, text: str, at: int, ids: tuple[int, ...]) -> Iterator[Given]:
        """Yield the `Given` of an earlier answer, if the ids decode to the text at index `at`."""
        is_space = [not self.tokenizer.decode([id]).strip() for id in ids]
        if all(is_space):
            return
        core = ids[is_space.index(False) : len(ids) - is_space[::-1].index(False)]
        for candidate in (ids, core):
            decoded = self.tokenizer.decode(candidate)
            lo = at - (len(decoded) - len(decoded.lstrip()))
            if lo >= 0 and text.startswith(decoded, lo):
                yield lo, lo + len(decoded), candidate
                return

    def _of(
        self,
        found: Rendered,
        question: Chars,
        documents: Documents,
        given: Sequence[Given],
        bos: Sequence[int] = (),
    ) -> Prompt:
        """Return the Prompt of a rendered text. `given` are earlier answers with known ids."""
        with ALL_CORES if len(found.text) >= ALONE_CHARS else nullcontext():
            own, chars = self.tokenizer.read(found.text, found.bare, given)
        ids, offsets = (*bos, *own), [*[(0, 0)] * len(bos), *chars]

        def rows(lo: int, hi: int) -> tuple[int, int]:
            """Return the rows of the tokens that overlap characters lo:hi, or (0, 0) if none do."""
            first = bisect_left(offsets, lo + 1, lo=len(bos), key=lambda chars: chars[1])
            stop = bisect_left(offsets, hi, lo=first, key=lambda chars: chars[0])
            return (first, stop) if lo < hi and first < stop else (0, 0)

        places, ends = list[tuple[int, int, str]](), defaultdict[str, int](int)
        for document, source in documents:
            core = document.strip()
            lo = found.text.find(core, ends[core]) if core else -1
            if lo >= 0:
                ends[core] = lo + len(core)
                places.append((*rows(lo, ends[core]), source))
        return self._prompt(ids, rows(*question), documents, places)

    def _prompt(
        self,
        ids: tuple[int, ...],
        last_user_rows: tuple[int, int],
        documents: Documents,
        places: Sequence[tuple[int, int, str]] = (),
    ) -> Prompt:
        """Return the Prompt of token ids. `places` are (lo, hi, source) of each document's rows."""
        if not ids:
            raise InputError("The prompt is empty. Pass at least one token of text.")
        sources = {text.strip(): source for text, source in documents}
        found = [chunk for chunk in self.spans.find(ids, sources) if chunk.stop < len(ids)]
        segments = tuple(self._segments(ids, found, places))
        first_chunk = next((each.start for each in segments if each.kind == "chunk"), -1)
        return Prompt(segments, last_user_rows=last_user_rows, first_chunk=first_chunk)

    def _segments(
        self,
        ids: tuple[int, ...],
        found: Sequence[Segment],
        places: Sequence[tuple[int, int, str]],
    ) -> Iterator[Segment]:
        """Yield the prefix, the chunks, and fresh segments between and after the chunks."""
        at = 0
        first = next((chunk for chunk in found if chunk.source != CODE), None)
        # if the chunk's first token merged with the token before, the merged token is not shared
        begin = first.start - (first.row == 1) if first is not None else 0
        if begin >= self.min_tokens:
            at = begin
            yield Segment(ids[:at], 0, "prefix", (self.key_of(ids[:at], ""),))
        for chunk in found:
            lo, hi = chunk.start, chunk.stop
            if lo < at:  # source code inside the prefix
                continue
            if at < lo:
                yield Segment(ids[at:lo], at)
            at = hi
            if chunk.source == CODE:
                yield Segment(chunk.tokens, lo, source=CODE)
                continue
            held = (
                (min(hi, stop) - max(lo, start), stop - start, i)
                for i, (start, stop, _) in enumerate(places)
            )
            n_rows, _, number = max(held, default=(0, 0, -1))
            if n_rows > 0:
                chunk = replace(chunk, source=places[number][2], document=number)
            yield replace(chunk, keys=(self.key_of(chunk.run, self.context),))
        yield Segment(ids[at:], at)


def _without_system(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Move all system text to the first user message, which is created if necessary."""
    contents = [turn.pieces for turn in turns if turn.role == "system" and turn.text]
    system = [part for parts in contents for part in (*parts, Piece("\n\n"))]
    rest = [turn for turn in turns if turn.role != "system"]
    at = next((i for i, turn in enumerate(rest) if turn.role == "user"), None)
    if at is None:
        return [ChatMessage("user", tuple(system)), *rest]
    return [*rest[:at], replace(rest[at], content=(*system, *rest[at].content)), *rest[at + 1 :]]
