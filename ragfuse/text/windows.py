"""A document's chunks in windows that are encoded in one go, so that a chunk sees the text it stands in.

Ids only: what encodes them, and where that is kept, are others' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

Ids = Sequence[int]


@dataclass(frozen=True)
class Window:
    """Neighbouring chunks of a document, each followed by the ids of a gap, and the ids that stand before them."""

    before: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    gap: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All chunks with their gaps."""
        return tuple(token for chunk in self.chunks for token in (*chunk, *self.gap))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(lo, hi) of each chunk in `tokens`."""
        spans, at = [], 0
        for chunk in self.chunks:
            spans.append((at, at + len(chunk)))
            at += len(chunk) + len(self.gap)
        return tuple(spans)


def stand_in() -> str:
    """Plain text to stand before what nothing stands before: paragraphs on unlike things, about 300 tokens."""
    return files("ragfuse.text").joinpath("stand_in.txt").read_text("utf-8").strip()


def windows(chunks: Iterable[Ids], stands_in: Ids, reach: int, size: int, gap: Ids = ()) -> Iterator[Window]:
    """The chunks of one document, in order, in windows of up to `size` ids, or of one chunk that is longer.

    Before a window stand the last `reach` ids of what is before it in the document; `stands_in` is before everything.
    Takes one chunk more than it has given out at most.
    """
    before, window, length = tuple(stands_in), list[tuple[int, ...]](), 0
    for chunk in chunks:
        if window and length + len(chunk) + len(gap) > size:
            full = Window(_last(before, reach), tuple(window), tuple(gap))
            yield full
            before, window, length = _last(before + full.tokens, reach), [], 0
        window.append(tuple(chunk))
        length += len(chunk) + len(gap)
    if window:
        yield Window(_last(before, reach), tuple(window), tuple(gap))


def _last(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    return ids[max(0, len(ids) - count) :]
