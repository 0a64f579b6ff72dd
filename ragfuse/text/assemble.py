"""Messages and chunks in, Prompt out: tokens of every piece, what is reused, under which keys, at which position.

Pieces are tokenised apart and their ids concatenated: nothing is decoded and encoded again, so a chunk has the same ids
wherever it stands. Which text is a chunk is decided before (`chunks`); what is in the store, after (`plan`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from ragfuse.core import ChunkKey, Prompt, Segment
from ragfuse.errors import InputError
from ragfuse.text.calls import PLAIN, CallFormat, spelled
from ragfuse.text.chunks import Piece, peel
from ragfuse.text.known_spans import Match
from ragfuse.text.turns import Content, Turn

Message = tuple[str, str | Sequence[Piece]] | Turn
"""(role, content), or a turn; a content is one text or pieces."""

Render = Callable[..., str]
Encode = Callable[[str, bool], Sequence[int]]
KeyOf = Callable[[tuple[int, ...], str], ChunkKey]
Find = Callable[[Sequence[int]], Sequence[Match]]


@dataclass(frozen=True, slots=True)
class _Run:
    """Ids that were tokenised together, or some rows of a known run: those from `row` on of `stored`."""

    tokens: tuple[int, ...]
    is_chunk: bool = False
    source: str = ""
    text: str = ""
    stored: tuple[int, ...] = ()
    row: int = 0
    is_template: bool = False


@dataclass(frozen=True)
class Assembler:
    """Turns messages, or plain text, into a Prompt for one model, whose tokenizer and chat template it is given.

    `encode(text, allow_special)` gives ids and adds none of its own; `key_of(ids, context)` the key of a run ("" =
    alone); `render(messages)`, or `render(messages, tools)` where it knows of tools, the chat template with the
    generation prompt, roles and contents being plain strings; `calls` how it writes calls of tools.

    A chunk is a piece that says so, or a known run of ids that `find` meets in what lies between such pieces, whole or
    in part. Texts that stand side by side are tokenised as one, so the ids do not depend on what is known.

    Before the first chunk stands the prefix: one segment with one key, if it has `min_tokens`. A chunk of at least
    `min_chunk_tokens` has the key of its KV in this `context`, wherever it stands. All else is fresh: the rest, a chunk
    that ends the prompt (something must be computed to answer), and a prompt without chunks as a whole.
    """

    encode: Encode
    key_of: KeyOf
    render: Render | None = None
    min_tokens: int = 8
    min_chunk_tokens: int = 8
    context: str = ""
    calls: CallFormat = PLAIN
    find: Find = lambda ids: ()

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The Prompt of a conversation, by the chat template. Special tokens are the template's own alone: in contents,
        calls and tools what looks like one stays text. tools: told of in words where the template does not render them.
        """
        if self.render is None:
            raise InputError("This model has no chat template; pass one text instead of messages or tools.")
        turns = [each if isinstance(each, Turn) else Turn(*each) for each in messages]
        turns = [replace(turn, content=_parts(turn.content)) for turn in turns]
        if not self.calls.native:
            turns, tools = spelled(turns, tools), ()
        parts = _render(partial(_filled, self.render, self.calls, self._is_markup, tools), turns)
        runs = [self._template(part) if isinstance(part, str) else self._run(part) for part in parts]
        return self._prompt(runs, turns[-1].role == "user")

    def text(self, pieces: Iterable[Piece], bos: Sequence[int] = ()) -> Prompt:
        """The Prompt of a text as it is, behind the ids `bos`."""
        return self._prompt([_Run(tuple(bos), is_template=True), *map(self._run, _parts(tuple(pieces)))], True)

    def _is_markup(self, text: str) -> bool:
        """Whether a template that writes this text would write special tokens with it."""
        return list(self.encode(text, True)) != list(self.encode(text, False))

    def _template(self, text: str) -> _Run:
        return _Run(tuple(self.encode(text, True)), is_template=True)

    def _run(self, piece: Piece) -> _Run:
        return _Run(piece.ids or tuple(self.encode(piece.text, False)), piece.kind == "chunk", piece.source, piece.text)

    def _prompt(self, runs: Sequence[_Run], asks: bool) -> Prompt:
        """asks: what is said last is a user's."""
        said = _said(runs) if asks else (0, 0)
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
            ids, at = tuple(token for run in group for token in run.tokens), 0
            for match in self.find(ids):
                span = match.span
                yield _Run(ids[at : match.lo])
                yield _Run(ids[match.lo : match.hi], True, span.source, span.text, tuple(span.tokens), match.row)
                at = match.hi
            yield _Run(ids[at:])

    def _segments(self, runs: Sequence[_Run], reused: Sequence[bool], n_prefix: int) -> Iterator[Segment]:
        """Segments that still stand at 0: the prefix if there is one, then one for each run."""
        prefix = tuple(token for run in runs[:n_prefix] for token in run.tokens)
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


def _said(runs: Sequence[_Run]) -> tuple[int, int]:
    """Rows lo:hi of the last text, with the chunks that stand beside it, that is no template's."""
    lo = hi = at = 0
    for is_template, group in groupby(runs, key=lambda run: run.is_template):
        n_tokens = sum(len(run.tokens) for run in group)
        if not is_template and n_tokens:
            lo, hi = at, at + n_tokens
        at += n_tokens
    return lo, hi


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


def _render(fill: Callable[[Sequence[Turn]], list[str | Piece]], turns: Sequence[Turn]) -> list[str | Piece]:
    """The rendered conversation: text of the template as str, contents as pieces.

    A template that refuses or drops a system message gets its text at the head of the first user message instead.
    """
    try:
        return fill(turns)
    except InputError:
        if not any(turn.role == "system" for turn in turns):
            raise
        return fill(_without_system(turns))


class _Slots:
    """Placeholders that stand for texts while a template renders, so that these are told from the template's own."""

    def __init__(self, is_markup: Callable[[str], bool]) -> None:
        self._is_markup = is_markup
        self._nonce = "x" + secrets.token_hex(16)
        self._held: list[tuple[Piece, ...]] = []

    def put(self, pieces: Iterable[Piece]) -> str:
        """What stands for these pieces."""
        self._held.append(tuple(pieces))
        return f"{self._nonce}n{len(self._held) - 1}x"

    def values(self, value: Any) -> Any:
        """The same JSON value with every text replaced; a template writes it between quotes, so it is escaped here."""
        if isinstance(value, str) and value:
            return self.put((Piece(json.dumps(value, ensure_ascii=False)[1:-1]),))
        if isinstance(value, Mapping):
            return {self.checked(name): self.values(each) for name, each in value.items()}
        return [self.values(each) for each in value] if isinstance(value, list | tuple) else value

    def checked(self, value: Any) -> Any:
        """The same JSON value, but of its texts and names those replaced that would become special tokens."""
        if isinstance(value, str):
            return self.values(value) if self._is_markup(value) else value
        if isinstance(value, Mapping):
            return {self.checked(name): self.checked(each) for name, each in value.items()}
        return [self.checked(each) for each in value] if isinstance(value, list | tuple) else value

    def filled(self, rendered: str) -> tuple[list[str | Piece], set[int]]:
        """Text of the template as str and what was put as pieces; which of it came back."""
        texts = re.split(f"{self._nonce}n([0-9]+)x", rendered)
        parts: list[str | Piece] = [texts[0]]
        for i, text in zip(texts[1::2], texts[2::2], strict=True):
            parts += [*self._held[int(i)], text]
        return [part for part in parts if part != ""], {int(i) for i in texts[1::2]}


def _filled(
    render: Render,
    calls: CallFormat,
    is_markup: Callable[[str], bool],
    tools: Sequence[Mapping[str, Any]],
    turns: Sequence[Turn],
) -> list[str | Piece]:
    slots = _Slots(is_markup)
    contents = [slots.put(_parts(turn.content)) for turn in turns]  # the numbers of the turns
    told = [calls.message(turn, content, slots.values) for turn, content in zip(turns, contents, strict=True)]
    messages = [{**message, **slots.checked(_beside(message))} for message in told]
    try:
        rendered = render(messages, [slots.checked(tool) for tool in tools]) if tools else render(messages)
    except Exception as error:  # a template may raise anything
        raise InputError(f"The chat template refuses the roles {[turn.role for turn in turns]}: {error}") from error
    filled, seen = slots.filled(rendered)
    _check_complete(turns, seen)
    return filled


def _beside(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message says of calls and results."""
    return {name: value for name, value in message.items() if name not in ("role", "content")}


def _check_complete(turns: Sequence[Turn], seen: set[int]) -> None:
    """InputError for a text that was left out; beside calls some templates have no place for one."""
    for i, turn in enumerate(turns):
        if turn.content and not turn.tool_calls and i not in seen:
            raise InputError(
                f"The chat template leaves out message {i} (role '{turn.role}') or changes its text; "
                "use a role that it renders, or pass one text instead of messages."
            )


def _without_system(turns: Sequence[Turn]) -> list[Turn]:
    """The same turns with all system text at the head of the first user turn, which is made if there is none."""
    said = [turn.content for turn in turns if turn.role == "system" and turn.content]
    system = [part for parts in said for part in (*parts, Piece("\n\n"))]
    rest = [turn for turn in turns if turn.role != "system"]
    at = next((i for i, turn in enumerate(rest) if turn.role == "user"), None)
    if at is None:
        return [Turn("user", tuple(system)), *rest]
    return [*rest[:at], replace(rest[at], content=(*system, *rest[at].content)), *rest[at + 1 :]]
