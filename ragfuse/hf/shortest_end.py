"""Finds a short completion of a text under a grammar, so that an answer is complete before its token limit.

A completion is found by trial: a copy of the matcher repeatedly takes the token that closes most (quotes, brackets,
braces), or else the one that passes the required text fastest. The result is short, but not always the shortest.
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
"""Types of llguidance, an optional dependency that is imported only where it is used."""

QUOTE, ESCAPE = ord('"'), ord("\\")
CLASS = 100
"""Ranks per kind of token: two tokens are of the same kind if their ranks, divided by this, are equal."""
TRIES = 150


class Within(tuple[bool, bool]):
    """Where in JSON a text ends: (inside a string, after a backslash there)."""

    __slots__ = ()

    def after(self, text: bytes) -> Within:
        """Return the state after more text."""
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
    def inverted(self) -> Within:
        """The opposite guess, because text around JSON may hold an unpaired quote."""
        return Within((not self[0], False))


OUTSIDE = Within((False, False))


class ShortestEnd:
    """A search for short completions over the tokens of one tokenizer."""

    def __init__(self, tokens: LLTokenizer, n_tokens: int) -> None:
        self.texts = [b"" if tokens.is_special_token(id) else tokens.decode_bytes([id]) for id in range(n_tokens)]
        self._inside = _ranks(self.texts, _rank_inside)
        self._outside = _ranks(self.texts, _rank_outside)
        self._escaped = _ranks(self.texts, _rank_escaped)

    def text(self, token: int) -> bytes:
        """Return the bytes of a token; none for a special token."""
        return self.texts[token] if token < len(self.texts) else b""

    def greedy(
        self, matcher: LLMatcher, within: Within, longest: int, exits: Sequence[Sequence[int]] = ()
    ) -> list[int] | None:
        """Find a completion by one greedy try, which is fast.

        Args:
            matcher: The state of the grammar.
            within: Where in JSON the text ends.
            longest: The most tokens of a completion.
            exits: Token runs that end free text, or the whole text, where neither quotes nor brackets do; shortest
                first.

        Returns:
            The tokens of a completion; None if none was found.
        """
        if matcher.is_accepting():
            return []
        completions = (
            self._straight(matcher.deep_copy(), guess, longest, exits) for guess in (within, within.inverted)
        )
        return next((completion for completion in completions if completion is not None), None)

    def _straight(
        self, matcher: LLMatcher, within: Within, longest: int, exits: Sequence[Sequence[int]]
    ) -> list[int] | None:
        """Find a completion by taking the best token at every step."""
        completion: list[int] = []
        while len(completion) < longest:
            forced = matcher.compute_ff_tokens()[
                : 1 if exits else None
            ]  # an exit may begin inside what must stand there
            steps = self._exit(matcher, exits) or forced or self._next(matcher, within, 1)
            if not steps or not matcher.consume_tokens(steps[: longest - len(completion)]):
                return None
            completion += steps[: longest - len(completion)]
            within = within.after(b"".join(self.texts[step] for step in steps))
            if matcher.is_accepting():
                return completion
        return None

    def _exit(self, matcher: LLMatcher, exits: Sequence[Sequence[int]]) -> list[int]:
        """Return the exit that ends the free text here, recognised by how few tokens may follow it; [] if none does."""
        for steps in exits:
            then = matcher.deep_copy()
            if then.try_consume_tokens(list(steps)) == len(steps):
                before, after = (int(allowed_by(each, len(self.texts)).sum()) for each in (matcher, then))
                if then.is_accepting() or before == 1 or 2 * after < before:
                    return list(steps)
        return []

    def search(self, matcher: LLMatcher, within: Within, longest: int) -> list[int] | None:
        """Find a completion by a best-first search over several tokens per step, 100 times slower than `greedy`."""
        order = count()
        heap: list[tuple[int, int, list[int], Within, LLMatcher]] = [(0, next(order), [], within, matcher)]
        for _ in range(TRIES):
            if not heap:
                return None
            size, _, completion, here, at = heapq.heappop(heap)
            if at.is_accepting():
                return completion
            for step in self._next(at, here, 6) if size < longest else ():
                then = at.deep_copy()
                if then.consume_token(step):
                    heapq.heappush(
                        heap, (size + 1, next(order), [*completion, step], here.after(self.texts[step]), then)
                    )
        return None

    def _next(self, matcher: LLMatcher, within: Within, n_kinds: int) -> list[int]:
        """Return the best allowed token of each of the `n_kinds` best kinds, best first."""
        allowed = np.flatnonzero(allowed_by(matcher, len(self.texts)))
        ranks = self._escaped if within[1] else self._inside if within[0] else self._outside
        found: list[int] = []
        for _ in range(n_kinds):
            if not len(allowed):
                break
            best = int(allowed[np.argmin(ranks[allowed])])
            found.append(best)
            if n_kinds > 1:
                allowed = allowed[ranks[allowed] // CLASS != ranks[best] // CLASS]
        return found


def allowed_by(matcher: LLMatcher, n_tokens: int) -> NDArray[np.bool_]:
    """Return which tokens may come next, bool [V]; ids beyond the tokenizer's never may."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    allowed = np.zeros(n_tokens, dtype=np.bool_)
    allowed[: min(len(bits), n_tokens)] = bits[:n_tokens]
    return allowed


def _ranks(texts: Sequence[bytes], rank: Callable[[bytes], int]) -> NDArray[np.int32]:
    return np.fromiter((rank(text) if text else 9_900 for text in texts), dtype=np.int32, count=len(texts))


def _rank_outside(text: bytes) -> int:
    """Rank a token outside of strings: first what closes, then the shortest values, then what opens."""
    size = min(len(text), 90)
    for rank, is_kind in enumerate(_kinds_outside(text.lstrip(b" ") or text)):
        if is_kind:
            return rank * CLASS + 99 - size
    return 2_000 + 99 - size


def _kinds_outside(text: bytes) -> Iterator[bool]:
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
    """Rank a token in a string: first what ends it and closes most after it, then the longest plain text."""
    size = min(len(text), 90)
    if text[:1] == b'"':
        return 99 - size if not text[1:].strip(b"}]") else 100 + 99 - size if not text[1:].strip(b'}],: "') else 7_000
    if b'"' in text or b"\\" in text or not text.isascii() or not text.decode().isprintable():
        return 6_000 + size
    return (200 if text.isalnum() else 300) + 99 - size


def _rank_escaped(text: bytes) -> int:
    """Rank a token after a backslash: first one that completes the escape by itself."""
    return min(len(text), 90) if text[:1] in (b"n", b"r", b"t", b"/", b"\\") else 500
