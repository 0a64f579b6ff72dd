"""Build a `Prompt` from messages, a text or ids: tokens, positions and store keys of each segment.

The chat template renders the prompt's text. It is tokenised as a whole, by the model's own rules,
so its ids do not depend on which chunks are known. Chunks are found in the ids. The planner later
looks up their KV in the store.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.shared import ALL_CORES
from ragfuse.text.chat_messages import ChatMessage, Content, Piece
from ragfuse.text.chat_template import Chars, Rendered, rendered
from ragfuse.text.known_spans import Match
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, spelled
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import CODE
from ragfuse.types.prompt import Prompt, Segment

Message = tuple[str, Content] | ChatMessage
"""(role, content) or a `ChatMessage`; the content is one text or a list of texts and pieces."""

Render = Callable[..., str]
KeyOf = Callable[[tuple[int, ...], str], ChunkKey]
Find = Callable[[Sequence[int]], Sequence[Match]]
Given = tuple[int, int, tuple[int, ...]]
"""Characters lo:hi of a text, and the token ids already known for them."""
ALONE_CHARS = 1 << 15
"""Prompts of this many characters are tokenised one at a time, because each uses all cores."""


class Tokenizer(Protocol):
    """The part of a model's tokenizer that prompts are built with (`hf.tokens.TextEncoder`)."""

    def control_spans(self, text: str) -> Sequence[Chars]:
        """Return the characters lo:hi of each substring that would become a control token."""
        ...

    def read(
        self, text: str, bare: Sequence[Chars] = (), given: Sequence[Given] = ()
    ) -> tuple[Sequence[int], Sequence[Chars]]:
        """Tokenise a whole prompt.

        Args:
            text: The prompt.
            bare: Characters that look like a control token but must be encoded as text.
            given: Text with known ids. Ignored if tokenising the whole text puts a token across its
                ends.

        Returns:
            The ids, and the characters of each.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as if they were inside a text."""
        ...


@dataclass(frozen=True)
class Assembler:
    """A builder of `Prompt`s from messages, text or ids, for one model.

    A chunk is a known run of ids that `find` matches, whole or in part. Segments of a prompt: the
    text before the first chunk is the prefix if it has at least `min_tokens`, and has one key. Each
    chunk is one segment; its key depends on `context`, not on its position. The rest is fresh,
    including a chunk at the end of the prompt (at least one token must be computed) and a prompt
    without chunks.

    Args:
        tokenizer: The model's tokenizer.
        key_of: `key_of(ids, context)` returns the key of a run's KV; context "" means encoded
            alone.
        render: The chat template as `render(messages)` or `render(messages, tools)`, with plain
            strings as roles and contents; None: the model has none.
        min_tokens: Minimum tokens of a prefix that is reused.
        context: Digest of the tokens that chunks were encoded after.
        calls: The template's format of tool calls.
        find: Finds known runs in ids.
        documents: (text, source) of documents that the prompt may contain. A chunk inside one gets
            its source. A text given several times has one source per occurrence, in order.
    """

    tokenizer: Tokenizer
    key_of: KeyOf
    render: Render | None = None
    min_tokens: int = 8
    context: str = ""
    calls: CallFormat = DEFAULT_CALL_FORMAT
    find: Find = lambda ids: ()
    documents: Sequence[tuple[str, str]] = ()

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """Return the Prompt of a conversation, rendered by the chat template.

        Only the template can write control tokens. In contents, calls and tools, text that looks
        like one is encoded as text.

        Args:
            messages: The conversation.
            tools: JSON schemas of tools; described in a message if the template does not render
                tools.

        Raises:
            InputError: The model has no chat template, or the template rejects the messages.
        """
        if self.render is None:
            raise InputError(
                "This model has no chat template; pass one text instead of messages or tools."
            )
        turns = [each if isinstance(each, ChatMessage) else ChatMessage(*each) for each in messages]
        turns = [replace(turn, content=turn.pieces) for turn in turns]
        if not self.calls.native:
            turns, tools = spelled(turns, tools), ()
        try:
            found = self._rendered(turns, tools)
        except InputError:  # the template rejects or drops a system message
            if not any(turn.role == "system" for turn in turns):
                raise
            turns = _without_system(turns)
            found = self._rendered(turns, tools)
        given = list[Given]()
        for turn, chars in zip(turns, found.contents, strict=True):
            if chars is not None and len(turn.pieces) == 1:
                given += self._given(found.text, chars[0], turn.pieces[0].ids)
        core = turns[-1].text.strip()
        at = found.text.rfind(core)
        last = found.contents[-1] or (at, at + len(core))
        return self._of(found, last if turns[-1].role == "user" and core else (0, 0), given)

    def text(self, text: str, bos: Sequence[int] = ()) -> Prompt:
        """Return the Prompt of a text without a chat template, after the ids `bos`."""
        return self._of(
            Rendered(text, tuple(self.tokenizer.control_spans(text))), (0, len(text)), (), bos
        )

    def ids(self, ids: Sequence[int]) -> Prompt:
        """Return the Prompt of exactly these ids, with known chunks in it."""
        return self._prompt(tuple(ids), (0, len(ids)))

    def _rendered(
        self, turns: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> Rendered:
        render = self.render

        def write(messages: list[dict[str, Any]], schemas: list[Any]) -> str:
            try:
                return (
                    str(render(messages, schemas) if schemas else render(messages))
                    if render is not None
                    else ""
                )
            except Exception as error:  # a template may raise anything
                raise InputError(
                    "The chat template does not accept messages of the roles"
                    f" {[turn.role for turn in turns]} ({error}). Change the roles or their order,"
                    " or pass one text instead of messages."
                ) from error

        messages = list(map(self.calls.message, turns))
        return rendered(write, messages, tools, self.tokenizer.control_spans)

    def _given(self, text: str, at: int, ids: tuple[int, ...]) -> Iterator[Given]:
        """Yield the characters of an answer at `at` and its ids, if the ids decode to this text."""
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
        self, found: Rendered, question: Chars, given: Sequence[Given], bos: Sequence[int] = ()
    ) -> Prompt:
        """Tokenise a rendered text into a Prompt; `given` holds answers with known ids."""
        with ALL_CORES if len(found.text) >= ALONE_CHARS else nullcontext():
            own, chars = self.tokenizer.read(found.text, found.bare, given)
        ids, offsets = (*bos, *own), [*[(0, 0)] * len(bos), *chars]

        def rows(lo: int, hi: int) -> tuple[int, int]:
            """Return the rows whose tokens overlap these characters; (0, 0) if none."""
            first = bisect_left(offsets, lo + 1, lo=len(bos), key=lambda chars: chars[1])
            stop = bisect_left(offsets, hi, lo=first, key=lambda chars: chars[0])
            return (first, stop) if lo < hi and first < stop else (0, 0)

        documents, ends = list[tuple[int, int, str]](), defaultdict[str, int](int)
        for document, source in self.documents:
            core = document.strip()
            lo = found.text.find(core, ends[core]) if core else -1
            if lo >= 0:
                ends[core] = lo + len(core)
                documents.append((*rows(lo, ends[core]), source))
        return self._prompt(ids, rows(*question), documents)

    def _prompt(
        self,
        ids: tuple[int, ...],
        last_user_rows: tuple[int, int],
        documents: Sequence[tuple[int, int, str]] = (),
    ) -> Prompt:
        if not ids:
            raise InputError("The prompt is empty; wanted at least one token of text.")
        segments = list(self._segments(ids, documents))
        starts = accumulate((len(segment.tokens) for segment in segments), initial=0)
        placed = tuple(
            replace(segment, start=start) for segment, start in zip(segments, starts, strict=False)
        )
        first_chunk = next((segment.start for segment in placed if segment.kind == "chunk"), -1)
        return Prompt(placed, last_user_rows=last_user_rows, first_chunk=first_chunk)

    def _segments(
        self, ids: tuple[int, ...], documents: Sequence[tuple[int, int, str]]
    ) -> Iterator[Segment]:
        """Yield the segments, all at position 0: prefix, chunks, and the ids between them."""
        at, matches = 0, [match for match in self.find(ids) if match.hi < len(ids)]
        first = next((match for match in matches if match.span.source != CODE), None)
        begin = first.lo - (first.row == 1) if first else 0  # a merged first token is not shared
        if begin >= self.min_tokens:
            at = begin
            yield Segment(ids[:at], 0, "prefix", (self.key_of(ids[:at], ""),))
        for match in matches:
            if match.lo < at:  # code inside the prefix
                continue
            if at < match.lo:
                yield Segment(ids[at : match.lo], 0)
            span, at = match.span, match.hi
            if span.source == CODE:
                yield Segment(ids[match.lo : at], 0, source=CODE)
                continue
            key = self.key_of(span.tokens, self.context)
            tokens = ids[match.lo : match.hi]
            rows, stored = (
                ((match.row, match.row + len(tokens)), span.tokens)
                if tokens != span.tokens
                else (None, ())
            )
            held = (
                (min(match.hi, hi) - max(match.lo, lo), hi - lo, i)
                for i, (lo, hi, _) in enumerate(documents)
            )
            n_rows, _, number = max(held, default=(0, 0, -1))
            if n_rows <= 0:
                number = -1
            source = documents[number][2] if number >= 0 else span.source
            yield Segment(
                tokens, 0, "chunk", (key,), source, span.text, rows, stored=stored, document=number
            )
        yield Segment(ids[at:], 0)


def _without_system(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Move all system text to the first user message; create one if there is none."""
    contents = [turn.pieces for turn in turns if turn.role == "system" and turn.text]
    system = [part for parts in contents for part in (*parts, Piece("\n\n"))]
    rest = [turn for turn in turns if turn.role != "system"]
    at = next((i for i, turn in enumerate(rest) if turn.role == "user"), None)
    if at is None:
        return [ChatMessage("user", tuple(system)), *rest]
    return [*rest[:at], replace(rest[at], content=(*system, *rest[at].content)), *rest[at + 1 :]]
