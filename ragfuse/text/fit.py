"""Shortens the contents of messages by dropping their last chunks, with the separators before these.

It works on text only; the caller decides whether a prompt is too long and how many chunks to drop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ragfuse.text.chat_messages import Piece


@dataclass(frozen=True)
class ShortenedContents:
    """Contents of messages without some chunks, and the sources of the dropped chunks, in order."""

    contents: tuple[tuple[Piece, ...], ...]
    sources: tuple[str, ...] = ()


def drop_last_chunks(contents: Sequence[Sequence[Piece]], n: int, question: int = -1) -> ShortenedContents:
    """Drop the last n chunks of the contents, with the text that separated them from the chunks before.

    Args:
        contents: The pieces of each message.
        n: Number of chunks to drop.
        question: Index of the message with the question; if it consists of chunks only, they are the question and stay.
    """
    places = list(_places(contents, question % len(contents) if contents else 0))
    dropped = places[max(0, len(places) - n) :]
    dropped_by_message: dict[int, set[int]] = {}
    for i, at in dropped:
        dropped_by_message.setdefault(i, set()).add(at)
    kept = (_without(pieces, dropped_by_message.get(index, ())) for index, pieces in enumerate(contents))
    return ShortenedContents(tuple(map(tuple, kept)), tuple(contents[i][at].source for i, at in dropped))


def _places(contents: Sequence[Sequence[Piece]], question: int) -> Iterator[tuple[int, int]]:
    """Yield (message, piece) indices of the chunks that may be dropped."""
    for index, pieces in enumerate(contents):
        has_text = any(piece.kind == "fresh" and piece.text.strip() for piece in pieces)
        if has_text or index != question:
            yield from ((index, at) for at, piece in enumerate(pieces) if piece.kind == "chunk" and piece.text.strip())


def _without(pieces: Sequence[Piece], dropped: Collection[int]) -> list[Piece]:
    """Return a content without these chunks, which are its last ones, and without the separators before them."""
    if not dropped:
        return list(pieces)
    groups, first = list(_groups(pieces)), min(dropped)
    gaps = Counter(_text(gap) for gap, at in groups[1:] if at is not None)
    kept: list[Piece] = []
    for number, (gap, at) in enumerate(groups):
        if at in dropped and number and _separates(_text(gap), gaps):
            continue
        is_behind = at is None or first < at
        if is_behind and (_text(gap)[:1].isspace() or not gap):
            _strip(kept)
        kept += gap if at is None or at in dropped else [*gap, pieces[at]]
    return kept


def _groups(pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], int | None]]:
    """Yield fresh text and the index of the chunk after it; at last the text after all chunks, with None."""
    gap: list[Piece] = []
    for at, piece in enumerate(pieces):
        if piece.kind == "fresh":
            gap.append(piece)
        else:
            yield gap, at
            gap = []
    yield gap, None


def _separates(text: str, gaps: Counter[str]) -> bool:
    """Return whether a text between two chunks is a separator: it has no letters, or occurs between others too."""
    return gaps[text] > 1 or not any(letter.isalpha() for letter in text)


def _strip(kept: list[Piece]) -> None:
    """Remove white space at the end of the last fresh text."""
    while kept and kept[-1].kind == "fresh":
        text = kept.pop().text.rstrip()
        if text:
            kept.append(Piece(text))
            return


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)
