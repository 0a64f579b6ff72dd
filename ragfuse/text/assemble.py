"""Messages and chunks in, Prompt out: tokens of every piece, what is reused, under which keys, at which position.

Pieces are tokenised apart and their ids concatenated: nothing is decoded and encoded again, so a chunk has the same ids
wherever it stands. Which text is a chunk is decided before (`chunks`); what is in the store, after (`plan`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ragfuse.core import ChunkKey, Prompt, Segment, amid, token_digest
from ragfuse.errors import InputError
from ragfuse.text.chunks import Piece, peel

Message = tuple[str, str | Sequence[Piece]]
"""(role, content)."""

Render = Callable[[list[dict[str, str]]], str]
Encode = Callable[[str, bool], Sequence[int]]
KeyOf = Callable[[tuple[int, ...], str], ChunkKey]


@dataclass(frozen=True, slots=True)
class _Run:
    """Ids that were tokenised together."""

    tokens: tuple[int, ...]
    is_chunk: bool = False
    source: str = ""
    text: str = ""


@dataclass(frozen=True)
class Assembler:
    """Turns messages, or plain text, into a Prompt for one model, whose tokenizer and chat template it is given.

    `encode(text, allow_special)` gives ids and adds none of its own; `key_of(ids, context)` the key of a run ("" =
    alone); `render(messages)` the chat template with the generation prompt, roles and contents being plain strings.

    Before the first chunk stands the prefix: one module with one key, if it has `min_tokens`. A chunk of at least
    `min_chunk_tokens` has the key of its KV behind that module, then that of its KV alone. One that does not stand
    first has before both of them the keys of its KV amid other text, behind that module and behind none: there it
    saw other text before itself, as it does here (unless not `has_amid`: such entries are not made). All else is
    fresh: the rest, a chunk that ends the prompt (something must be computed to answer, and part of a chunk has no
    key), and a prompt without chunks as a whole.
    """

    encode: Encode
    key_of: KeyOf
    render: Render | None = None
    min_tokens: int = 8
    min_chunk_tokens: int = 8
    has_amid: bool = True

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """The Prompt of a conversation, by the chat template. Contents are never read as special tokens."""
        if self.render is None:
            raise InputError("This model has no chat template; pass one text instead of messages.")
        parts = _render(self.render, [(role, _parts(content)) for role, content in messages])
        return self._prompt([self._template(part) if isinstance(part, str) else self._run(part) for part in parts])

    def text(self, pieces: Iterable[Piece], bos: Sequence[int] = ()) -> Prompt:
        """The Prompt of a text as it is, behind the ids `bos`."""
        return self._prompt([_Run(tuple(bos)), *map(self._run, _parts(tuple(pieces)))])

    def _template(self, text: str) -> _Run:
        return _Run(tuple(self.encode(text, True)))

    def _run(self, piece: Piece) -> _Run:
        return _Run(tuple(self.encode(piece.text, False)), piece.kind == "chunk", piece.source, piece.text)

    def _prompt(self, runs: Sequence[_Run]) -> Prompt:
        runs = [run for run in runs if run.tokens]
        if not runs:
            raise InputError("The prompt is empty; wanted at least one token of text.")
        reused = [run.is_chunk and len(run.tokens) >= self.min_chunk_tokens for run in runs[:-1]] + [False]
        n_prefix = next((i for i, run in enumerate(runs) if run.is_chunk), len(runs)) if any(reused) else 0
        return Prompt(_placed(self._segments(runs, reused, n_prefix)))

    def _segments(self, runs: Sequence[_Run], reused: Sequence[bool], n_prefix: int) -> Iterator[Segment]:
        """Segments that still stand at 0: the module if there is one, then one for each run."""
        prefix = tuple(token for run in runs[:n_prefix] for token in run.tokens)
        module = bool(prefix) and len(prefix) >= self.min_tokens
        if prefix:
            yield Segment(prefix, 0, "module", (self.key_of(prefix, ""),)) if module else Segment(prefix, 0)
        first, later = contexts_behind(token_digest(prefix) if module else "", self.has_amid)
        for at, (run, keep) in enumerate(zip(runs[n_prefix:], reused[n_prefix:], strict=True)):
            contexts = later if at else first
            alone = self.key_of(run.tokens, "") if keep else None
            keys = tuple(replace(alone, context=context) for context in contexts) if alone else ()
            yield Segment(run.tokens, 0, "chunk", keys, run.source, run.text) if keep else Segment(run.tokens, 0)


def contexts_behind(prefix: str, has_amid: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Contexts to look for behind a prefix (its digest, "": none), best first: of its first chunk, of all others."""
    first = (prefix, "") if prefix else ("",)
    return first, (*map(amid, first), *first) if has_amid else first


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


def _parts(content: str | Sequence[Piece]) -> tuple[Piece, ...]:
    pieces = (Piece(content),) if isinstance(content, str) else content
    return tuple(part for piece in pieces if piece.text for part in peel(piece))


_Turn = tuple[str, tuple[Piece, ...]]


def _render(render: Render, turns: Sequence[_Turn]) -> list[str | Piece]:
    """The rendered conversation: text of the template as str, contents as pieces.

    A template that refuses or drops a system message gets its text at the head of the first user message instead.
    """
    try:
        return _filled(render, turns)
    except InputError:
        if not any(role == "system" for role, _ in turns):
            raise
        return _filled(render, _without_system(turns))


def _filled(render: Render, turns: Sequence[_Turn]) -> list[str | Piece]:
    nonce = "x" + secrets.token_hex(16)
    messages = [{"role": role, "content": f"{nonce}n{i}x"} for i, (role, _) in enumerate(turns)]
    try:
        rendered = render(messages)
    except Exception as error:  # a template may raise anything
        raise InputError(f"The chat template refuses the roles {[role for role, _ in turns]}: {error}") from error
    texts = re.split(f"{nonce}n([0-9]+)x", rendered)
    _check_complete(turns, {int(i) for i in texts[1::2]})
    filled: list[str | Piece] = [texts[0]]
    for i, text in zip(texts[1::2], texts[2::2], strict=True):
        filled += [*turns[int(i)][1], text]
    return [part for part in filled if part != ""]


def _check_complete(turns: Sequence[_Turn], seen: set[int]) -> None:
    for i, (role, parts) in enumerate(turns):
        if parts and i not in seen:
            raise InputError(
                f"The chat template leaves out message {i} (role '{role}') or changes its text; "
                "use a role that it renders, or pass one text instead of messages."
            )


def _without_system(turns: Sequence[_Turn]) -> list[_Turn]:
    """The same turns with all system text at the head of the first user turn, which is made if there is none."""
    system = [part for role, parts in turns if role == "system" and parts for part in (*parts, Piece("\n\n"))]
    rest = [turn for turn in turns if turn[0] != "system"]
    at = next((i for i, (role, _) in enumerate(rest) if role == "user"), None)
    if at is None:
        return [("user", tuple(system)), *rest]
    return [*rest[:at], ("user", (*system, *rest[at][1])), *rest[at + 1 :]]
