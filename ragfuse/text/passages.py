"""Split token ids into passages by content, so that a text has the same passages in any prompt.

A short passage ends at the end of a paragraph, a longer passage at the end of a line. A hash of the
ids determines where an overlong line is cut. Special tokens always end a passage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

MIN_PASSAGE_TOKENS, LINE_END_TOKENS, MAX_PASSAGE_TOKENS = 32, 128, 512
"""Tokens of a passage: minimum, length at which it ends with the current line, and maximum."""
ROLE_LINE_TOKENS = 3
"""A line after a special token is a role's name if it has at most this many tokens."""
MAX_CODE_SHARE = 0.3
"""Maximum share of characters in code-like lines. A text with a larger share is source code."""
_INLINE = re.compile(r"`[^`\n]*`|<[^<>\n]*>|\{+ ?[\w.]+ ?\}+")
_JSON_VALUE = re.compile(r'"[^"\n]*"|true|false|null')
_JSON_SIGNS = frozenset("[]{}:,.-+0123456789 \t")
_CODE_LINE = re.compile(
    r"""[;{}(\[\\]$|\w\(.{0,200}\)(?: ->.{0,200})?:$|^[\])}]|\w\(\)|\w\([^)\s]{0,200}[,=.'"]"""
    r"""|\w\[[\w'":]|[=!<>+*|&:]=|[-=]>|::|&&|\|\||[\w)\]"'] = |=[("'\[{]"""
    r"""|^(?:for|if|while|elif|with|except|class) .{0,200}:$"""
    r"""|^(?:import|return|from [\w.]+ import|def|async|await|const|let|var|static"""
    r"""|if \(|for \(|while \(|[#]include|//|/\*|else:|try:)"""
)
_WINDOW = 4


class Border(IntEnum):
    """The kind of border after a token. SPECIAL means a special token, which ends any passage."""

    NONE = 0
    LINE = 1
    PARAGRAPH = 2
    SPECIAL = 3


BorderOf = Callable[[int], tuple[int, bool]]
"""Returns the `Border` after a token, and whether the token also contains text."""


def passages(
    ids: Sequence[int],
    border_of: BorderOf,
    recurs: Callable[[tuple[int, int]], bool] = lambda rows: True,
) -> Iterator[tuple[int, int]]:
    """Yield passages of `MIN_PASSAGE_TOKENS` to `MAX_PASSAGE_TOKENS` tokens as (lo, hi), in order.

    A passage consists of consecutive lines that all recur. A line that changed is left out,
    but the lines before and after it can be in passages. White space around a passage is left out.

    Args:
        ids: Token ids.
        border_of: Returns the border after a token.
        recurs: Returns whether an earlier prompt contained the line with tokens lo:hi. Called once
            per line, in order.
    """
    run, is_open = list[tuple[int, int]](), False  # passages of the recurring lines so far
    for lo, hi, border in [*_lines(ids, border_of), (0, 0, Border.SPECIAL)]:
        is_known = lo < hi and recurs((lo, hi))
        if is_known and is_open and hi - run[-1][0] <= MAX_PASSAGE_TOKENS:
            run[-1] = run[-1][0], hi
        elif is_known:
            run.append((lo, hi))
        if is_known and border < Border.SPECIAL:
            is_open = hi - run[-1][0] < (
                LINE_END_TOKENS if border == Border.LINE else MIN_PASSAGE_TOKENS
            )
            continue
        (first, before), (last, end) = (run[-2:] * 2)[:2] if run else ((0, 0), (0, 0))
        if before < end and end - last < MIN_PASSAGE_TOKENS and end - first <= MAX_PASSAGE_TOKENS:
            run[-2:] = [(first, end)]  # merge a short last passage with the passage before
        yield from (each for each in run if each[1] - each[0] >= MIN_PASSAGE_TOKENS)
        run, is_open = [], False


def _lines(ids: Sequence[int], border_of: BorderOf) -> Iterator[tuple[int, int, int]]:
    """Yield (lo, hi, border after the line) for each line with text, in linear time."""
    start, end, ends = -1, 0, 0  # of the current line, and the border found after the line so far
    after_special = -1  # end of the last special token
    for at, border, has_text in _borders(ids, border_of):
        if has_text and ends:
            yield start, end, ends
            start = -1
        if has_text:
            start, end, ends = (at if start < 0 else start), at + 1, 0
            if end - start > MAX_PASSAGE_TOKENS:
                cut = _hashed_cut(ids, start)
                yield start, cut, 0
                start = cut
        if start >= 0 and border:
            ends = max(ends, border)
            if start == after_special and end - start <= ROLE_LINE_TOKENS:
                start, ends = -1, 0
        if border == Border.SPECIAL:
            after_special = at + 1
            if start >= 0:
                yield start, end, border
            start, ends = -1, 0
    if start >= 0:
        yield start, end, Border.SPECIAL


def is_code(text: str) -> bool:
    """Return whether a text is source code, in which small errors matter more than in prose."""
    lines = [line.strip() for line in _INLINE.sub("x", text).splitlines()]
    # in a one-line paragraph, a footnote mark makes only the mark's sentence look like code
    parts = [part for line in lines if not _is_json(line) for part in re.split("(?<=[.?!]) ", line)]
    n_code = sum(map(len, filter(_CODE_LINE.search, parts)))
    return n_code > MAX_CODE_SHARE * sum(map(len, lines))


def _is_json(line: str) -> bool:
    """Return whether a line consists only of JSON."""
    signs = _JSON_VALUE.sub("", line)
    return signs != line and _JSON_SIGNS.issuperset(signs)


def last_paragraph(ids: Sequence[int], border_of: BorderOf) -> int:
    """Return the index of the first token of the last paragraph with text."""
    begins = is_new_paragraph = 0
    for at, border, has_text in _borders(ids, border_of):
        if is_new_paragraph and has_text:
            begins, is_new_paragraph = at, 0
        if border >= Border.PARAGRAPH:
            is_new_paragraph = 1
    return begins


def _borders(ids: Sequence[int], border_of: BorderOf) -> Iterator[tuple[int, int, bool]]:
    """Yield each token's index, the border after the token, and True if the token has text."""
    before = 0
    for at, id in enumerate(ids):
        border, has_text = border_of(id)
        if border == Border.LINE and not has_text and before:
            border = Border.PARAGRAPH
        yield at, border, has_text
        before = border


def _hashed_cut(ids: Sequence[int], start: int) -> int:
    """Return the index at which to cut an overlong passage: after the ids with the lowest hash."""
    cuts = range(start + MAX_PASSAGE_TOKENS // 2, start + MAX_PASSAGE_TOKENS + 1)
    # hashes of tuples of ints are the same in every process
    return min(cuts, key=lambda at: hash(tuple(ids[at - _WINDOW : at])))
