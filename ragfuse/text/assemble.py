"""Messages and chunks in, Prompt out: tokens of every piece, what is reused, under which keys, at which position.

A prompt is what the chat template writes, as the model's tokenizer reads it. Chunks in it are tokenised apart, so that
they have the same ids wherever they stand, unless that would change what is read. Which text is a chunk is decided
before (`chunks`), where it stands in what the template wrote in `rendered`; what is in the store, after (`plan`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.fork import ForkLock
from ragfuse.text.chat_messages import ChatMessage, Content
from ragfuse.text.chunks import Piece, peel
from ragfuse.text.known_spans import Match
from ragfuse.text.rendered import Chars, Conversation, PlacedPiece, Rendered
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, spelled
from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Prompt, Segment

Message = tuple[str, str | Sequence[Piece]] | ChatMessage
"""(role, content), or a turn; a content is one text or pieces."""

Render = Callable[..., str]
KeyOf = Callable[[tuple[int, ...], str], ChunkKey]
Find = Callable[[Sequence[int]], Sequence[Match]]
Cut = tuple[int, int, tuple[int, ...]]
"""Characters lo:hi that are tokenised apart; by these ids, unless there are none."""
ALONE_CHARS = 1 << 15
"""Characters from which on prompts are tokenised one at a time: all cores work on one, and several at once would keep
the interpreter from everybody else for longer."""
_LONG = ForkLock()


class Tokenizer(Protocol):
    """A model's tokenizer, as prompts are made with it."""

    def forged(self, text: str, is_begun: bool = False) -> Sequence[Chars]:
        """Where a text holds what would be read as a control token and is none. is_begun: it begins an answer, in which
        marks of thoughts and calls are real."""
        ...

    def parts(
        self, text: str, bare: Sequence[Chars] = (), cuts: Sequence[Cut] = ()
    ) -> Sequence[tuple[tuple[int, ...], int, Sequence[Chars]]]:
        """A whole prompt as ids, number of the cut that they are (-1: none), and the characters of each id.

        bare: looks like a control token and is text. A cut that would change what is read is left out.
        """
        ...

    def said(self, ids: Sequence[int]) -> str:
        """What ids say in the middle of a text."""
        ...


@dataclass(frozen=True, slots=True)
class _Run:
    """Ids that were tokenised together, or some rows of a known run: those from `row` on of `stored`."""

    tokens: tuple[int, ...]
    is_chunk: bool = False
    source: str = ""
    text: str = ""
    stored: tuple[int, ...] = ()
    row: int = 0


@dataclass(frozen=True)
class Assembler:
    """Turns messages, text or ids into a Prompt for one model, whose tokenizer and chat template it is given.

    `words` is the tokenizer; `key_of(ids, context)` gives the key of a run ("" = alone); `render(messages)`, or
    `render(messages, tools)` where it knows of tools, is the chat template, roles and contents being plain strings;
    `calls` how it writes calls of tools.

    A chunk is a piece that says so, or a known run of ids that `find` meets in what lies between such pieces, whole or
    in part. All else is tokenised as a whole, so the ids do not depend on what is known. whole: pieces that say so are
    tokenised with what stands around them, too, so that the ids are the model's own. goes_on: `render` leaves the last
    message open, which begins the answer. check: raises for a text that cannot fit, before it is tokenised.

    Before the first chunk stands the prefix: one segment with one key, if it has `min_tokens`. A chunk of at least
    `min_chunk_tokens` has the key of its KV in this `context`, wherever it stands. All else is fresh: the rest, a chunk
    that ends the prompt (something must be computed to answer), and a prompt without chunks as a whole.
    """

    words: Tokenizer
    key_of: KeyOf
    render: Render | None = None
    min_tokens: int = 8
    min_chunk_tokens: int = 8
    context: str = ""
    calls: CallFormat = DEFAULT_CALL_FORMAT
    find: Find = lambda ids: ()
    whole: bool = False
    goes_on: bool = False
    check: Callable[[str], None] = lambda text: None

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The Prompt of a conversation, by the chat template. Control tokens are the template's own alone: in contents,
        calls and tools what looks like one stays text, but for marks of thoughts and calls in an answer that is begun.
        tools: told of in words where the template does not render them.
        """
        if self.render is None:
            raise InputError("This model has no chat template; pass one text instead of messages or tools.")
        turns = [each if isinstance(each, ChatMessage) else ChatMessage(*each) for each in messages]
        turns = [replace(turn, content=_parts(turn.content)) for turn in turns]
        if not self.calls.native:
            turns, tools = spelled(turns, tools), ()
        return self._of(self._rendered(turns, tools), turns[-1].role == "user")

    def text(self, pieces: Iterable[Piece], bos: Sequence[int] = ()) -> Prompt:
        """The Prompt of a text as it is, behind the ids `bos`."""
        parts, at, placed = _parts(tuple(pieces)), 0, list[PlacedPiece]()
        for piece in parts:
            if piece.kind == "chunk" or piece.ids:
                placed.append(PlacedPiece(at, at + len(piece.text), piece))
            at += len(piece.text)
        text = "".join(piece.text for piece in parts)
        return self._of(Rendered(text, tuple(self.words.forged(text)), tuple(placed), (0, len(text))), True, bos)

    def ids(self, ids: Sequence[int]) -> Prompt:
        """The Prompt of these ids and no others."""
        return self._prompt([_Run(tuple(ids))], (0, len(ids)))

    def _rendered(self, turns: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Rendered:
        """The conversation as the template writes it.

        A template that refuses or drops a system message gets its text at the head of the first user message instead.
        """
        try:
            return self._written(turns, tools)
        except InputError:
            if not any(turn.role == "system" for turn in turns):
                raise
            return self._written(_without_system(turns), tools)

    def _written(self, turns: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Rendered:
        render, roles = self.render, [turn.role for turn in turns]

        def write(messages: list[dict[str, Any]], told: list[Any]) -> str:
            try:
                return str(render(messages, told) if told else render(messages)) if render is not None else ""
            except Exception as error:  # a template may raise anything
                raise InputError(f"The chat template refuses the roles {roles}: {error}") from error

        contents = [_parts(turn.content) for turn in turns]
        texts = ["".join(piece.text for piece in pieces) for pieces in contents]
        messages = [self.calls.message(turn, text, _same) for turn, text in zip(turns, texts, strict=True)]
        return Conversation(messages, contents, tools, self.words.forged, self.goes_on).rendered(write)

    def _of(self, rendered: Rendered, asks: bool, bos: Sequence[int] = ()) -> Prompt:
        """asks: what is said last is a user's."""
        placed = [] if self.whole else [each for each in rendered.placed if each.piece.text.strip()]
        cuts, pieces = list[Cut](), list[Piece]()
        for each in placed:
            cut = (each.lo, each.hi, ()) if not each.piece.ids else _as_said(self.words, rendered.text, each)
            if cut is not None and (not cuts or cuts[-1][1] <= cut[0]):
                cuts.append(cut)
                pieces.append(each.piece)
        self.check(rendered.text)
        with _LONG if len(rendered.text) >= ALONE_CHARS else nullcontext():
            parts = self.words.parts(rendered.text, rendered.bare, cuts)
        runs = [_Run(tuple(bos))]
        for tokens, number, _ in parts:
            piece = pieces[number] if number >= 0 else Piece("")
            is_chunk = number >= 0 and piece.kind == "chunk"
            runs.append(_Run(tokens, is_chunk, piece.source, piece.text) if is_chunk else _Run(tokens))
        offsets = [each for _, _, each in parts]
        return self._prompt(runs, _rows(offsets, rendered.said, len(bos)) if asks else (0, 0))

    def _prompt(self, runs: Sequence[_Run], said: tuple[int, int]) -> Prompt:
        runs = [run for run in self._found(runs) if run.tokens]
        if not runs:
            raise InputError("The prompt is empty; wanted at least one token of text.")
        reused = [run.is_chunk and len(run.tokens) >= (1 if run.stored else self.min_chunk_tokens) for run in runs]
        reused[-1] = False
        n_prefix = next((i for i, run in enumerate(runs) if run.is_chunk), len(runs)) if any(reused) else 0
        prompt = Prompt(_placed(self._segments(runs, reused, n_prefix)), said=said)
        chunks = (lo for each, (lo, _) in zip(prompt.segments, prompt.spans, strict=True) if each.kind == "chunk")
        return replace(prompt, first_chunk=next(chunks, -1))

    def _found(self, runs: Sequence[_Run]) -> Iterator[_Run]:
        """The same with known runs in what lies between chunks that were given."""
        for is_chunk, group in groupby(runs, key=lambda run: run.is_chunk):
            if is_chunk:
                yield from group
                continue
            ids, at = tuple(chain.from_iterable(run.tokens for run in group)), 0
            for match in self.find(ids):
                span = match.span
                yield _Run(ids[at : match.lo])
                yield _Run(ids[match.lo : match.hi], True, span.source, span.text, tuple(span.tokens), match.row)
                at = match.hi
            yield _Run(ids[at:])

    def _segments(self, runs: Sequence[_Run], reused: Sequence[bool], n_prefix: int) -> Iterator[Segment]:
        """Segments that still stand at 0: the prefix if there is one, then one for each run."""
        prefix = tuple(chain.from_iterable(run.tokens for run in runs[:n_prefix]))
        if len(prefix) >= self.min_tokens:
            yield Segment(prefix, 0, "prefix", (self.key_of(prefix, ""),))
        elif prefix:
            yield Segment(prefix, 0)
        for run, keep in zip(runs[n_prefix:], reused[n_prefix:], strict=True):
            if not keep:
                yield Segment(run.tokens, 0)
                continue
            is_part = run.stored and run.stored != run.tokens
            rows, stored = ((run.row, run.row + len(run.tokens)), run.stored) if is_part else (None, ())
            key = self.key_of(stored or run.tokens, self.context)
            yield Segment(run.tokens, 0, "chunk", (key,), run.source, run.text, rows, stored=stored)


def _placed(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same segments one behind the other from 0, neighbouring fresh ones as one."""
    placed: list[Segment] = []
    for segment in segments:
        if placed and placed[-1].kind == segment.kind == "fresh":
            before = placed.pop()
            placed.append(Segment(before.tokens + segment.tokens, before.start))
        else:
            placed.append(replace(segment, start=placed[-1].stop if placed else 0))
    return tuple(placed)


def _parts(content: Content) -> tuple[Piece, ...]:
    given = (content,) if isinstance(content, str) else content
    pieces = _joined(piece if isinstance(piece, Piece) else Piece(piece) for piece in given)
    return tuple(part for piece in pieces if piece.text for part in peel(piece))


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same with texts side by side as one, chunks that were only found in them too."""
    for is_text, group in groupby(pieces, key=lambda piece: not piece.ids and (piece.kind == "fresh" or piece.found)):
        if is_text:
            yield Piece("".join(piece.text for piece in group))
        else:
            yield from group


def _same(value: Any) -> Any:
    return value


def _rows(offsets: Iterable[Sequence[Chars]], chars: Chars, at: int) -> tuple[int, int]:
    """Rows of ids, of which the first is `at`, that hold some of these characters. offsets: of each part of the ids."""
    lo, hi = chars
    found = list[tuple[int, int]]()
    for each in offsets if lo < hi else ():
        first = bisect_left(each, lo + 1, key=lambda chars: chars[1])
        stop = bisect_left(each, hi, lo=first, key=lambda chars: chars[0])
        found += [(at + first, at + stop)] if first < stop else []
        at += len(each)
    return (found[0][0], found[-1][1]) if found else (0, 0)


def _as_said(words: Tokenizer, text: str, placed: PlacedPiece) -> Cut | None:
    """Where ids that a model wrote stand in a text, white space at their ends left out where the text has none."""
    ids, said = placed.piece.ids, text[placed.lo : placed.hi]
    core = said.strip()
    at = placed.lo + said.index(core)
    for some in (ids, _without_space(words, ids)):
        told = words.said(some)
        lo = at - (len(told) - len(told.lstrip()))
        if some and told.strip() == core and lo >= 0 and text.startswith(told, lo):
            return lo, lo + len(told), some
    return None


def _without_space(words: Tokenizer, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids without those at both ends that say white space alone."""
    lo, hi = 0, len(ids)
    while lo < hi and not words.said(ids[lo : lo + 1]).strip():
        lo += 1
    while hi > lo and not words.said(ids[hi - 1 : hi]).strip():
        hi -= 1
    return ids[lo:hi]


def _without_system(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The same turns with all system text at the head of the first user turn, which is made if there is none."""
    said = [turn.content for turn in turns if turn.role == "system" and turn.content]
    system = [part for parts in said for part in (*parts, Piece("\n\n"))]
    rest = [turn for turn in turns if turn.role != "system"]
    at = next((i for i, turn in enumerate(rest) if turn.role == "user"), None)
    if at is None:
        return [ChatMessage("user", tuple(system)), *rest]
    return [*rest[:at], replace(rest[at], content=(*system, *rest[at].content)), *rest[at + 1 :]]
