"""Builds a `Prompt` from messages, a text or ids: the tokens, positions and store keys of every segment.

The text of a prompt is what the chat template renders. It is tokenised as a whole, by the model's own rules, so its ids
do not depend on which chunks are known; these are found in the ids. The planner later looks their KV up in the store.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.shared import ALL_CORES
from ragfuse.text.chat_messages import ChatMessage, Content, Piece
from ragfuse.text.known_spans import Match
from ragfuse.text.rendered import Chars, Rendered, rendered
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, spelled
from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Prompt, Segment
from ragfuse.types.reasons import CODE

Message = tuple[str, Content] | ChatMessage
"""(role, content) or a `ChatMessage`; the content is one text or a list of texts and pieces."""

Render = Callable[..., str]
KeyOf = Callable[[tuple[int, ...], str], ChunkKey]
Find = Callable[[Sequence[int]], Sequence[Match]]
Given = tuple[int, int, tuple[int, ...]]
"""Characters lo:hi of a text whose ids are known, and these ids."""
ALONE_CHARS = 1 << 15
"""Prompts of at least this many characters are tokenised one at a time.

One prompt already uses all cores, and several at once would block the interpreter for longer.
"""


class Tokenizer(Protocol):
    """The part of a model's tokenizer that building prompts needs (`hf.tokens.TextEncoder`)."""

    def control_spans(self, text: str, is_begun: bool = False) -> Sequence[Chars]:
        """Return the characters lo:hi of everything in a text that would be tokenised as a control token.

        Args:
            text: The text.
            is_begun: The text is the beginning of an answer, in which the markup of thoughts and calls is genuine.
        """
        ...

    def parts(
        self, text: str, bare: Sequence[Chars] = (), given: Sequence[Given] = ()
    ) -> Sequence[tuple[tuple[int, ...], Sequence[Chars]]]:
        """Tokenise a whole prompt.

        Args:
            text: The prompt.
            bare: Characters that look like a control token and must be encoded as text.
            given: Text whose ids are known; ignored where a token of the whole text crosses its ends.

        Returns:
            Parts in order: their ids, and the characters of each id.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as in the middle of a text."""
        ...


@dataclass(frozen=True)
class Assembler:
    """A builder of `Prompt`s from messages, text or ids, for one model.

    A chunk is a known run of ids that `find` matches, whole or in part. The segments of a prompt: text before the first
    chunk is the prefix, one segment with one key, if it has at least `min_tokens`. A chunk is one segment; its key
    depends on `context`, not on its place. All else is fresh, also a chunk at the end of the prompt (something must be
    computed to answer) and a prompt without any chunk.

    Args:
        tokenizer: The model's tokenizer.
        key_of: `key_of(ids, context)` returns the key of a run's KV; context "" means encoded alone.
        render: The chat template as `render(messages)` or `render(messages, tools)`, with plain strings as roles and
            contents; None: the model has none.
        min_tokens: The least tokens of a prefix that is reused.
        context: Digest of what chunks were encoded behind.
        calls: How the template writes tool calls.
        find: Finds known runs in ids.
        continues_last: `render` leaves the last message open, so that the answer continues it.
        check: Called with the rendered text before it is tokenised; raises if the text is too long.
        documents: (text, source) of documents that the prompt may hold: a chunk in one has its source. Where a text
            has several sources, its places have them in order, the last ones if there are fewer places.
    """

    tokenizer: Tokenizer
    key_of: KeyOf
    render: Render | None = None
    min_tokens: int = 8
    context: str = ""
    calls: CallFormat = DEFAULT_CALL_FORMAT
    find: Find = lambda ids: ()
    continues_last: bool = False
    check: Callable[[str], None] = lambda text: None
    documents: Sequence[tuple[str, str]] = ()

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """Return the Prompt of a conversation, rendered by the chat template.

        Only the template writes control tokens: in contents, calls and tools, what looks like one is encoded as text,
        except for the markup of thoughts and calls in the beginning of an answer.

        Args:
            messages: The conversation.
            tools: JSON schemas of tools; described in a message if the template does not render tools.

        Raises:
            InputError: The model has no chat template, or the template rejects the messages.
        """
        if self.render is None:
            raise InputError("This model has no chat template; pass one text instead of messages or tools.")
        turns = [each if isinstance(each, ChatMessage) else ChatMessage(*each) for each in messages]
        turns = [replace(turn, content=turn.pieces) for turn in turns]
        if not self.calls.native:
            turns, tools = spelled(turns, tools), ()
        try:
            found = self._rendered(turns, tools)
        except InputError:  # of a system message that the template rejects or drops
            if not any(turn.role == "system" for turn in turns):
                raise
            turns = _without_system(turns)
            found = self._rendered(turns, tools)
        given = [
            _given(self.tokenizer, found.text, chars, turn.pieces[0].ids)
            for turn, chars in zip(turns, found.contents, strict=True)
            if chars is not None and len(turn.pieces) == 1 and turn.pieces[0].ids
        ]
        last = found.contents[-1] or _last(found.text, turns[-1].text.strip())
        return self._of(found, last if turns[-1].role == "user" else (0, 0), [each for each in given if each])

    def text(self, text: str, bos: Sequence[int] = ()) -> Prompt:
        """Return the Prompt of a text without a chat template, after the ids `bos`."""
        return self._of(Rendered(text, tuple(self.tokenizer.control_spans(text))), (0, len(text)), (), bos)

    def ids(self, ids: Sequence[int]) -> Prompt:
        """Return the Prompt of exactly these ids, with known chunks in it."""
        return self._prompt(tuple(ids), (0, len(ids)))

    def _rendered(self, turns: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Rendered:
        render = self.render

        def write(messages: list[dict[str, Any]], schemas: list[Any]) -> str:
            try:
                return str(render(messages, schemas) if schemas else render(messages)) if render is not None else ""
            except Exception as error:  # a template may raise anything
                raise InputError(
                    f"The chat template does not accept messages of the roles {[turn.role for turn in turns]} "
                    f"({error}). Change the roles or their order, or pass one text instead of messages."
                ) from error

        messages = [self.calls.message(turn, turn.text, lambda value: value) for turn in turns]
        return rendered(write, messages, tools, self.tokenizer.control_spans, self.continues_last)

    def _of(self, found: Rendered, question: Chars, given: Sequence[Given], bos: Sequence[int] = ()) -> Prompt:
        """Tokenise a rendered text into a Prompt.

        Args:
            found: The text.
            question: Characters of the last message if it is a user's, else (0, 0).
            given: Answers whose ids are known.
            bos: Ids before the text.
        """
        self.check(found.text)
        with ALL_CORES if len(found.text) >= ALONE_CHARS else nullcontext():
            parts = self.tokenizer.parts(found.text, found.bare, given)
        ids, offsets = (*bos, *chain.from_iterable(ids for ids, _ in parts)), [chars for _, chars in parts]
        documents = [(*_rows(offsets, chars, len(bos)), source) for chars, source in self._documents(found.text)]
        return self._prompt(ids, _rows(offsets, question, len(bos)), documents)

    def _documents(self, text: str) -> Iterator[tuple[Chars, str]]:
        """Yield the characters and the source of each place of a document in a text."""
        sources: dict[str, list[str]] = {}
        for document, source in self.documents:
            sources.setdefault(document.strip(), []).append(source)
        for document, given in sources.items():
            places = [found.span() for found in re.finditer(re.escape(document), text)] if document else []
            yield from zip(places, given[-len(places) :] + given[-1:] * len(places), strict=False)

    def _prompt(
        self,
        ids: tuple[int, ...],
        last_user_rows: tuple[int, int],
        documents: Sequence[tuple[int, int, str]] = (),
    ) -> Prompt:
        if not ids:
            raise InputError("The prompt is empty; wanted at least one token of text.")
        segments = list[Segment]()
        for segment in self._segments(ids, documents):
            segments.append(replace(segment, start=segments[-1].stop if segments else 0))
        prompt = Prompt(tuple(segments), last_user_rows=last_user_rows)
        chunks = (lo for each, (lo, _) in zip(prompt.segments, prompt.spans, strict=True) if each.kind == "chunk")
        return replace(prompt, first_chunk=next(chunks, -1))

    def _segments(self, ids: tuple[int, ...], documents: Sequence[tuple[int, int, str]]) -> Iterator[Segment]:
        """Yield segments without positions yet: the prefix if there is one, the chunks, and the ids between them."""
        at, matches = 0, [match for match in self.find(ids) if match.hi < len(ids)]
        first = next((match for match in matches if match.span.source != CODE), None)
        begin = first.lo - (first.row == 1) if first else 0  # a merged first token is not shared
        if begin >= self.min_tokens:
            at = begin
            yield Segment(ids[:at], 0, "prefix", (self.key_of(ids[:at], ""),))
        for match in matches:
            if match.lo < at:  # code in the prefix
                continue
            if at < match.lo:
                yield Segment(ids[at : match.lo], 0)
            span, at = match.span, match.hi
            if span.source == CODE:
                yield Segment(ids[match.lo : at], 0, source=CODE)
                continue
            key = self.key_of(span.tokens, self.context)
            tokens = ids[match.lo : match.hi]
            rows, stored = ((match.row, match.row + len(tokens)), span.tokens) if tokens != span.tokens else (None, ())
            held = ((min(match.hi, hi) - max(match.lo, lo), hi - lo, i) for i, (lo, hi, _) in enumerate(documents))
            n_rows, _, number = max(held, default=(0, 0, -1))
            if n_rows <= 0:
                number = -1
            source = documents[number][2] if number >= 0 else span.source
            yield Segment(tokens, 0, "chunk", (key,), source, span.text, rows, stored=stored, document=number)
        yield Segment(ids[at:], 0)


def _last(text: str, core: str) -> Chars:
    """Return where a text stands for the last time in another; (0, 0): nowhere."""
    at = text.rfind(core)
    return (at, at + len(core)) if at >= 0 else (0, 0)


def _rows(offsets: Iterable[Sequence[Chars]], chars: Chars, at: int) -> tuple[int, int]:
    """Return the rows lo:hi of the ids that hold any of these characters; (0, 0) if none.

    Args:
        offsets: Characters of each id, for each part of the ids.
        chars: Characters lo:hi.
        at: Row of the first id.
    """
    lo, hi = chars
    found = list[tuple[int, int]]()
    for each in offsets if lo < hi else ():
        first = bisect_left(each, lo + 1, key=lambda chars: chars[1])
        stop = bisect_left(each, hi, lo=first, key=lambda chars: chars[0])
        found += [(at + first, at + stop)] if first < stop else []
        at += len(each)
    return (found[0][0], found[-1][1]) if found else (0, 0)


def _given(tokenizer: Tokenizer, text: str, chars: Chars, ids: tuple[int, ...]) -> Given | None:
    """Return the characters of an answer whose ids are known, and those ids; None if these do not decode to the text.

    Args:
        tokenizer: The tokenizer.
        text: The rendered text.
        chars: Characters of the answer in it, without the white space around it.
        ids: The ids; those of white space at the ends are dropped if the text does not have it.
    """
    at, core = chars[0], text[slice(*chars)]
    for candidate in (ids, _without_space(tokenizer, ids)):
        decoded = tokenizer.decode(candidate)
        lo = at - (len(decoded) - len(decoded.lstrip()))
        if candidate and decoded.strip() == core and lo >= 0 and text.startswith(decoded, lo):
            return lo, lo + len(decoded), candidate
    return None


def _without_space(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids without leading and trailing ids that decode to white space."""
    while ids and not tokenizer.decode(ids[:1]).strip():
        ids = ids[1:]
    while ids and not tokenizer.decode(ids[-1:]).strip():
        ids = ids[:-1]
    return ids


def _without_system(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Move all system text to the head of the first user message, which is created if there is none."""
    contents = [turn.pieces for turn in turns if turn.role == "system" and turn.text]
    system = [part for parts in contents for part in (*parts, Piece("\n\n"))]
    rest = [turn for turn in turns if turn.role != "system"]
    at = next((i for i, turn in enumerate(rest) if turn.role == "user"), None)
    if at is None:
        return [ChatMessage("user", tuple(system)), *rest]
    return [*rest[:at], replace(rest[at], content=(*system, *rest[at].content)), *rest[at + 1 :]]
