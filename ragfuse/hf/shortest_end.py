"""The shortest way to the end of what a grammar wants, so that an answer is whole before its last token is spent.

A way is found by trying: a copy of the matcher takes, again and again, the token that closes most (quotes, brackets,
braces), or else gets over what must stand there soonest. That is short, not always the shortest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

LLMatcher = Any
LLTokenizer = Any
"""Of llguidance, which is an extra: imported where it is used."""

QUOTE, ESCAPE = ord('"'), ord("\\")
CLASS = 100
"""Ranks that share their hundreds are tokens of one sort."""
TRIES = 150


class Within(tuple[bool, bool]):
    """Where in JSON a text ends: in a string, and there behind a backslash."""

    __slots__ = ()

    def after(self, text: bytes) -> Within:
        """Behind so much more text."""
        inside, escaped = self
        for byte in text:
            if escaped:
                escaped = False
            elif byte == QUOTE:
                inside = not inside
            elif byte == ESCAPE:
                escaped = inside
        return Within((inside, escaped))

    @property
    def turned(self) -> Within:
        """The other guess: text around JSON may hold single quotes."""
        return Within((not self[0], False))


OUTSIDE = Within((False, False))


class ShortestEnd:
    """Ways to the end, over one tokenizer's tokens."""

    def __init__(self, tokens: LLTokenizer, n_tokens: int) -> None:
        self.texts = [b"" if tokens.is_special_token(id) else tokens.decode_bytes([id]) for id in range(n_tokens)]
        self._inside = _ranks(self.texts, _rank_inside)
        self._outside = _ranks(self.texts, _rank_outside)
        self._escaped = _ranks(self.texts, _rank_escaped)

    def text(self, token: int) -> bytes:
        """What a token says; nothing for one that stands for itself."""
        return self.texts[token] if token < len(self.texts) else b""

    def way(
        self, matcher: LLMatcher, within: Within, longest: int, exits: Sequence[Sequence[int]] = ()
    ) -> list[int] | None:
        """Tokens after which nothing is missing, at most so many; None: none was found, at once.

        exits: tokens that end a text which neither quotes nor brackets end, or all of it, the shortest way first.
        """
        if matcher.is_accepting():
            return []
        ways = (self._straight(matcher.deep_copy(), guess, longest, exits) for guess in (within, within.turned))
        return next((way for way in ways if way is not None), None)

    def _straight(
        self, matcher: LLMatcher, within: Within, longest: int, exits: Sequence[Sequence[int]]
    ) -> list[int] | None:
        """By the best token at every step."""
        way: list[int] = []
        while len(way) < longest:
            forced = matcher.compute_ff_tokens()[
                : 1 if exits else None
            ]  # an exit may begin inside what must stand there
            steps = self._exit(matcher, exits) or forced or self._next(matcher, within, 1)
            if not steps or not matcher.consume_tokens(steps[: longest - len(way)]):
                return None
            way += steps[: longest - len(way)]
            within = within.after(b"".join(self.texts[step] for step in steps))
            if matcher.is_accepting():
                return way
        return None

    def _exit(self, matcher: LLMatcher, exits: Sequence[Sequence[int]]) -> list[int]:
        """The tokens that end the text which is free here, [] where none does: then few tokens may follow."""
        for steps in exits:
            then = matcher.deep_copy()
            if then.try_consume_tokens(list(steps)) == len(steps):
                before, after = (int(allowed_by(each, len(self.texts)).sum()) for each in (matcher, then))
                if then.is_accepting() or before == 1 or 2 * after < before:
                    return list(steps)
        return []

    def searched(self, matcher: LLMatcher, within: Within, longest: int) -> list[int] | None:
        """The same by the best token of each sort, ways that took fewest first: a hundred times as long."""
        order = count()
        ways: list[tuple[int, int, list[int], Within, LLMatcher]] = [(0, next(order), [], within, matcher)]
        for _ in range(TRIES):
            if not ways:
                return None
            size, _, way, here, at = heapq.heappop(ways)
            if at.is_accepting():
                return way
            for step in self._next(at, here, 6) if size < longest else ():
                then = at.deep_copy()
                if then.consume_token(step):
                    heapq.heappush(ways, (size + 1, next(order), [*way, step], here.after(self.texts[step]), then))
        return None

    def _next(self, matcher: LLMatcher, within: Within, sorts: int) -> list[int]:
        """The best allowed token of each of so many sorts, best sort first."""
        allowed = np.flatnonzero(allowed_by(matcher, len(self.texts)))
        ranks = self._escaped if within[1] else self._inside if within[0] else self._outside
        found: list[int] = []
        for _ in range(sorts):
            if not len(allowed):
                break
            best = int(allowed[np.argmin(ranks[allowed])])
            found.append(best)
            if sorts > 1:
                allowed = allowed[ranks[allowed] // CLASS != ranks[best] // CLASS]
        return found


def allowed_by(matcher: LLMatcher, n_tokens: int) -> NDArray[np.bool_]:
    """bool [V]: tokens that may come next; those beyond the tokenizer's never may."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    allowed = np.zeros(n_tokens, dtype=np.bool_)
    allowed[: min(len(bits), n_tokens)] = bits[:n_tokens]
    return allowed


def _ranks(texts: Sequence[bytes], rank: Callable[[bytes], int]) -> NDArray[np.int32]:
    return np.fromiter((rank(text) if text else 9_900 for text in texts), dtype=np.int32, count=len(texts))


def _rank_outside(text: bytes) -> int:
    """Of a token outside of strings: what closes, then the shortest values, then what opens."""
    size = min(len(text), 90)
    for rank, sort in enumerate(_sorts_outside(text.lstrip(b" ") or text)):
        if sort:
            return rank * CLASS + 99 - size
    return 2_000 + 99 - size


def _sorts_outside(text: bytes) -> Iterator[bool]:
    yield not text.strip(b"}]")
    yield text == b'""'
    yield text[:1] in (b",", b":") and not text.strip(b',: "')
    yield text in (b"0", b"1")
    yield text.isdigit()
    yield text in (b"[]", b"{}", b"null", b"true", b"false")
    yield text == b'"'
    yield text.isalpha()
    yield text == b"["
    yield text == b"{"


def _rank_inside(text: bytes) -> int:
    """Of a token in a string: what ends it and closes most behind it, then the longest plain text."""
    size = min(len(text), 90)
    if text[:1] == b'"':
        return 99 - size if not text[1:].strip(b"}]") else 100 + 99 - size if not text[1:].strip(b'}],: "') else 7_000
    if b'"' in text or b"\\" in text or not text.isascii() or not text.decode().isprintable():
        return 6_000 + size
    return (200 if text.isalnum() else 300) + 99 - size


def _rank_escaped(text: bytes) -> int:
    """Of a token behind a backslash: one that needs no more."""
    return min(len(text), 90) if text[:1] in (b"n", b"r", b"t", b"/", b"\\") else 500
