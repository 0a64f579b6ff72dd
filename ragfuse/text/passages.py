"""Splits token ids into passages by their content, so that the same passage is split the same way in any prompt.

Passages end at paragraphs, else at lines, else at places chosen by a hash of the ids, and always at special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

MIN_PASSAGE_TOKENS, LINE_END_TOKENS, MAX_PASSAGE_TOKENS = 32, 128, 512
"""Tokens of a passage: the least, the number from which on the end of a line ends it, and the most."""
ROLE_LINE_TOKENS = 3
"""The most tokens of the line after a special token in which a chat template names the role."""
PROGRAM_CHARS = frozenset("_{}[]=<>;\\`#$@")
"""Characters that are common in programs and markup, and rare in prose."""
MAX_PROSE_SHARE = 0.01
"""The greatest share of `PROGRAM_CHARS` in prose.

98 of 100 passages of articles have less than 0.006, 95 of 100 passages of programs more than 0.012.
"""
_WINDOW = 4
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Border(IntEnum):
    """What a token ends: nothing, a line, a paragraph, or (a special token) any passage."""

    NONE = 0
    LINE = 1
    PARAGRAPH = 2
    SPECIAL = 3


BorderOf = Callable[[int], tuple[int, bool]]
"""Returns what a token ends, as a `Border`, and whether it also contains text."""


def passages(ids: Sequence[int], border_of: BorderOf) -> Iterator[tuple[int, int]]:
    """Yield passages of `MIN_PASSAGE_TOKENS` to `MAX_PASSAGE_TOKENS` tokens as (lo, hi), in order.

    White space around a passage is not part of it. Lines and paragraphs that are too short are joined with the next
    one, unless that is long enough by itself: a short text before it, such as an instruction or a heading, may precede
    other passages in another prompt. Shorter text that stands alone is left out. The time is linear in the ids.
    """
    marks = list(_borders(ids, border_of))
    start, end, line_end = -1, 0, 0  # of the current passage, and where its last line ended
    line_start = -1  # where the current line begins
    after_special = -1  # where the last special token ended
    for at, border, has_text in marks:
        after_special = at + 1 if border == Border.SPECIAL else after_special
        if start < 0 and has_text:
            start = line_end = at
        if start < 0:
            continue
        end = at + 1 if has_text else end
        line_start = at if line_start < 0 and has_text else line_start
        if has_text and start < line_start < start + MIN_PASSAGE_TOKENS <= line_start + MIN_PASSAGE_TOKENS <= end:
            start = line_start
        while end - start > MAX_PASSAGE_TOKENS:
            fits_line = start + MIN_PASSAGE_TOKENS <= line_end <= start + MAX_PASSAGE_TOKENS
            cut = line_end if fits_line else _hashed_cut(ids, start)
            yield start, cut
            start = line_end = next(row for row in range(cut, end) if marks[row][2])
        line_end, line_start = (end, -1) if border else (line_end, line_start)
        if border and start == after_special and end - start <= ROLE_LINE_TOKENS:  # the line with the role
            start = -1
        elif border and end - start >= (LINE_END_TOKENS if border == Border.LINE else MIN_PASSAGE_TOKENS):
            yield start, end
            start = -1
        elif border == Border.SPECIAL:
            start = -1
    if start >= 0 and end - start >= MIN_PASSAGE_TOKENS:
        yield start, end


def is_prose(text: str) -> bool:
    """Return whether a text is prose; in programs, tables and markup a small error matters more."""
    return sum(letter in PROGRAM_CHARS for letter in text) <= MAX_PROSE_SHARE * len(text)


def last_paragraph(ids: Sequence[int], border_of: BorderOf) -> int:
    """Return where the last paragraph with text begins; 0 if there is only one."""
    begins = is_new_paragraph = 0
    for at, border, has_text in _borders(ids, border_of):
        if is_new_paragraph and has_text:
            begins, is_new_paragraph = at, 0
        if border >= Border.PARAGRAPH:
            is_new_paragraph = 1
    return begins


def _borders(ids: Sequence[int], border_of: BorderOf) -> Iterator[tuple[int, int, bool]]:
    """Yield each token's place, what it ends, and whether it has text; two adjacent line ends end a paragraph."""
    before = 0
    for at, id in enumerate(ids):
        border, has_text = border_of(id)
        if border == Border.LINE and not has_text and before:
            border = Border.PARAGRAPH
        yield at, border, has_text
        before = border


def _hashed_cut(ids: Sequence[int], start: int) -> int:
    """Return the cut in the second half of the longest passage where the hash of the preceding ids is least."""

    def mixed(at: int) -> int:
        value = 0
        for id in ids[at - _WINDOW : at]:
            value = ((value ^ id) * _FACTOR) & _MASK
        return value

    return min(range(start + MAX_PASSAGE_TOKENS // 2, start + MAX_PASSAGE_TOKENS + 1), key=mixed)
