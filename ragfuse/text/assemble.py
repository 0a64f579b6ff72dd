"""Builds a `Prompt` from messages and chunks: the tokens, positions and store keys of every segment.

The text of a prompt is what the chat template renders. Chunks in it are tokenised separately, so that they have the
same ids in every prompt, unless that would change the decoded text. `text/chunks.py` decides which text is a chunk,
`text/rendered.py` finds it in the rendered text, and the planner later looks its KV up in the store.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.shared import ALL_CORES
from ragfuse.text.chat_messages import ChatMessage, Content
from ragfuse.text.chunks import Piece, peel
from ragfuse.text.known_spans import Match
from ragfuse.text.rendered import Chars, Conversation, PlacedPiece, Rendered
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, spelled
from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Prompt, Segment
from ragfuse.types.reasons import CODE

Message = tuple[str, str | Sequence[Piece]] | ChatMessage
"""(role, content) or a `ChatMessage`; the content is one text or a list of pieces."""

Render = Callable[..., str]
KeyOf = Callable[[tuple[int, ...], str], ChunkKey]
Find = Callable[[Sequence[int]], Sequence[Match]]
Cut = tuple[int, int, tuple[int, ...]]
"""Characters lo:hi that are tokenised separately from the text around them, and their ids if these are known."""
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
        self, text: str, bare: Sequence[Chars] = (), cuts: Sequence[Cut] = ()
    ) -> Sequence[tuple[tuple[int, ...], int, Sequence[Chars]]]:
        """Tokenise a whole prompt.

        Args:
            text: The prompt.
            bare: Characters that look like a control token and must be encoded as text.
            cuts: Pieces to tokenise separately; a cut that would change the decoded text is ignored.

        Returns:
            Parts in order: their ids, the number of the cut that they are (-1: none), and the characters of each id.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as in the middle of a text."""
        ...


@dataclass(frozen=True, slots=True)
class _Run:
    """Ids that were tokenised together, or a part of a known run: the rows of `stored` from `row` on."""

    tokens: tuple[int, ...]
    is_chunk: bool = False
    source: str = ""
    text: str = ""
    stored: tuple[int, ...] = ()
    row: int = 0


@dataclass(frozen=True)
class Assembler:
    """A builder of `Prompt`s from messages, text or ids, for one model.

    A chunk is a piece of kind "chunk", or a known run of ids that `find` matches in the text between such pieces, whole
    or in part. All other text is tokenised as a whole, so its ids do not depend on which chunks are known.

    The segments of a prompt: text before the first chunk is the prefix, one segment with one key, if it has at least
    `min_tokens`. A chunk of at least `min_chunk_tokens` is one segment; its key depends on `context`, not on its place.
    All else is fresh, also a chunk at the end of the prompt (something must be computed to answer) and a prompt without
    any chunk.

    Args:
        tokenizer: The model's tokenizer.
        key_of: `key_of(ids, context)` returns the key of a run's KV; context "" means encoded alone.
        render: The chat template as `render(messages)` or `render(messages, tools)`, with plain strings as roles and
            contents; None: the model has none.
        min_tokens: The least tokens of a prefix that is reused.
        min_chunk_tokens: The least tokens of a chunk that is reused.
        context: Digest of what chunks were encoded behind.
        calls: How the template writes tool calls.
        find: Finds known runs in ids.
        as_one_text: Tokenise chunks together with the text around them, so that all ids are the model's own.
        continues_last: `render` leaves the last message open, so that the answer continues it.
        check: Called with the rendered text before it is tokenised; raises if the text is too long.
    """

    tokenizer: Tokenizer
    key_of: KeyOf
    render: Render | None = None
    min_tokens: int = 8
    min_chunk_tokens: int = 8
    context: str = ""
    calls: CallFormat = DEFAULT_CALL_FORMAT
    find: Find = lambda ids: ()
    as_one_text: bool = False
    continues_last: bool = False
    check: Callable[[str], None] = lambda text: None

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
        turns = [replace(turn, content=_parts(turn.content)) for turn in turns]
        if not self.calls.native:
            turns, tools = spelled(turns, tools), ()
        return self._of(self._rendered(turns, tools), turns[-1].role == "user")

    def text(self, pieces: Iterable[Piece], bos: Sequence[int] = ()) -> Prompt:
        """Return the Prompt of a text without a chat template, after the ids `bos`."""
        parts, at, placed = _parts(tuple(pieces)), 0, list[PlacedPiece]()
        for piece in parts:
            if piece.kind == "chunk" or piece.ids:
                placed.append(PlacedPiece(at, at + len(piece.text), piece))
            at += len(piece.text)
        text = "".join(piece.text for piece in parts)
        bare = tuple(self.tokenizer.control_spans(text))
        return self._of(Rendered(text, bare, tuple(placed), (0, len(text))), True, bos)

    def ids(self, ids: Sequence[int]) -> Prompt:
        """Return the Prompt of exactly these ids, with known chunks in it."""
        return self._prompt([_Run(tuple(ids))], (0, len(ids)))

    def _rendered(self, turns: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Rendered:
        """Render the conversation by the template.

        If the template rejects or drops a system message, its text is put at the head of the first user message.
        """
        try:
            return self._rendered_once(turns, tools)
        except InputError:
            if not any(turn.role == "system" for turn in turns):
                raise
            return self._rendered_once(_without_system(turns), tools)

    def _rendered_once(self, turns: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Rendered:
        render, roles = self.render, [turn.role for turn in turns]

        def write(messages: list[dict[str, Any]], schemas: list[Any]) -> str:
            try:
                return str(render(messages, schemas) if schemas else render(messages)) if render is not None else ""
            except Exception as error:  # a template may raise anything
                raise InputError(
                    f"The chat template does not accept messages of the roles {roles} ({error}). Change the roles or "
                    "their order, or pass one text instead of messages."
                ) from error

        contents = [_parts(turn.content) for turn in turns]
        texts = ["".join(piece.text for piece in pieces) for pieces in contents]
        messages = [self.calls.message(turn, text, _identity) for turn, text in zip(turns, texts, strict=True)]
        conversation = Conversation(messages, contents, tools, self.tokenizer.control_spans, self.continues_last)
        return conversation.rendered(write)

    def _of(self, rendered: Rendered, is_question: bool, bos: Sequence[int] = ()) -> Prompt:
        """Tokenise a rendered text into a Prompt.

        Args:
            rendered: The text, with its chunks.
            is_question: Whether the last message is a user's.
            bos: Ids before the text.
        """
        placed = [] if self.as_one_text else [each for each in rendered.placed if each.piece.text.strip()]
        cuts, pieces = list[Cut](), list[Piece]()
        for each in placed:
            cut = (each.lo, each.hi, ()) if not each.piece.ids else _cut_of_ids(self.tokenizer, rendered.text, each)
            if cut is not None and (not cuts or cuts[-1][1] <= cut[0]):
                cuts.append(cut)
                pieces.append(each.piece)
        self.check(rendered.text)
        with ALL_CORES if len(rendered.text) >= ALONE_CHARS else nullcontext():
            parts = self.tokenizer.parts(rendered.text, rendered.bare, cuts)
        runs = [_Run(tuple(bos))]
        for tokens, number, _ in parts:
            piece = pieces[number] if number >= 0 else Piece("")
            is_chunk = number >= 0 and piece.kind == "chunk"
            runs.append(_Run(tokens, is_chunk, piece.source, piece.text) if is_chunk else _Run(tokens))
        offsets = [each for _, _, each in parts]
        return self._prompt(runs, _rows(offsets, rendered.last_message, len(bos)) if is_question else (0, 0))

    def _prompt(self, runs: Sequence[_Run], last_user_rows: tuple[int, int]) -> Prompt:
        runs = [run for run in self._found(runs) if run.tokens]
        if not runs:
            raise InputError("The prompt is empty; wanted at least one token of text.")
        reused = [run.is_chunk and len(run.tokens) >= (1 if run.stored else self.min_chunk_tokens) for run in runs]
        reused[-1] = False
        reused = [keep and run.source != CODE for keep, run in zip(reused, runs, strict=True)]
        n_prefix = next((i for i, run in enumerate(runs) if run.is_chunk), len(runs)) if any(reused) else 0
        prompt = Prompt(_placed(self._segments(runs, reused, n_prefix)), last_user_rows=last_user_rows)
        chunks = (lo for each, (lo, _) in zip(prompt.segments, prompt.spans, strict=True) if each.kind == "chunk")
        return replace(prompt, first_chunk=next(chunks, -1))

    def _found(self, runs: Sequence[_Run]) -> Iterator[_Run]:
        """Yield the runs, with the ids between given chunks split at known runs."""
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
        """Yield segments without positions yet: the prefix if there is one, then one for each run."""
        prefix = tuple(chain.from_iterable(run.tokens for run in runs[:n_prefix]))
        if len(prefix) >= self.min_tokens:
            yield Segment(prefix, 0, "prefix", (self.key_of(prefix, ""),))
        elif prefix:
            yield Segment(prefix, 0)
        for run, keep in zip(runs[n_prefix:], reused[n_prefix:], strict=True):
            if not keep:
                is_told = run.is_chunk and (run.source == CODE or len(run.tokens) < self.min_chunk_tokens)
                yield Segment(run.tokens, 0, source=run.source if is_told else "")
                continue
            is_part = run.stored and run.stored != run.tokens
            rows, stored = ((run.row, run.row + len(run.tokens)), run.stored) if is_part else (None, ())
            key = self.key_of(stored or run.tokens, self.context)
            yield Segment(run.tokens, 0, "chunk", (key,), run.source, run.text, rows, stored=stored)


def _placed(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Give the segments consecutive positions from 0, and merge neighbouring fresh ones that are no chunks."""
    placed: list[Segment] = []
    for segment in segments:
        if placed and placed[-1].is_new_text and segment.is_new_text:
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
    """Yield the pieces with neighbouring texts merged, including chunks that were only found in a text."""
    for is_text, group in groupby(pieces, key=lambda piece: not piece.ids and (piece.kind == "fresh" or piece.found)):
        if is_text:
            yield Piece("".join(piece.text for piece in group))
        else:
            yield from group


def _identity(value: Any) -> Any:
    return value


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


def _cut_of_ids(tokenizer: Tokenizer, text: str, placed: PlacedPiece) -> Cut | None:
    """Return the characters of a text whose ids are known, and those ids; None if these do not decode to the text.

    Ids of white space at the ends are dropped if the text does not have it.
    """
    ids, written = placed.piece.ids, text[placed.lo : placed.hi]
    core = written.strip()
    at = placed.lo + written.index(core)
    for candidate in (ids, _without_space(tokenizer, ids)):
        decoded = tokenizer.decode(candidate)
        lo = at - (len(decoded) - len(decoded.lstrip()))
        if candidate and decoded.strip() == core and lo >= 0 and text.startswith(decoded, lo):
            return lo, lo + len(decoded), candidate
    return None


def _without_space(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids without leading and trailing ids that decode to white space."""
    lo, hi = 0, len(ids)
    while lo < hi and not tokenizer.decode(ids[lo : lo + 1]).strip():
        lo += 1
    while hi > lo and not tokenizer.decode(ids[hi - 1 : hi]).strip():
        hi -= 1
    return ids[lo:hi]


def _without_system(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Move all system text to the head of the first user message, which is created if there is none."""
    contents = [turn.content for turn in turns if turn.role == "system" and turn.content]
    system = [part for parts in contents for part in (*parts, Piece("\n\n"))]
    rest = [turn for turn in turns if turn.role != "system"]
    at = next((i for i, turn in enumerate(rest) if turn.role == "user"), None)
    if at is None:
        return [ChatMessage("user", tuple(system)), *rest]
    return [*rest[:at], replace(rest[at], content=(*system, *rest[at].content)), *rest[at + 1 :]]
